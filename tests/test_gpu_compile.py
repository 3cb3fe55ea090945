"""The engine's programs compiled for an H200 that is not there: `make test-gpu-compile`, in its own environment."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from engine_tools import tiny_engine

from jaxserve.bench import gpu_compile
from jaxserve.bench.gpu_compile import MIB, Case, Compiled, Target, cases, faults, inspect, pool_copies, unavailable
from jaxserve.bench.ptx import (
    Kernel,
    arithmetic,
    compiler_output,
    kernel_name,
    kernels_of,
    ptx_of,
    stores_before_wgmma_are_fenced,
)
from jaxserve.kernels_pallas.matmul.mosaic import matmul
from jaxserve.kernels_pallas.matmul.tiles import TileConfig
from jaxserve.kernels_pallas.paged_attention import mosaic_backend
from jaxserve.kernels_pallas.paged_attention.mosaic import mosaic_attention

needs_compiler = pytest.mark.gpu_compile


@pytest.fixture(scope="session")
def target():
    if reason := unavailable():
        pytest.skip(reason)
    return Target()


@needs_compiler
@pytest.mark.parametrize("case", cases(everything=False), ids=str)
def test_a_program(target, case):
    compiled = inspect(case, target)
    print(f"\n{gpu_compile.markdown(compiled)}")
    assert not faults(compiled)


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, "bfloat16") for shape in [(64, 64), (64, 128), (128, 64), (128, 128), (256, 64), (256, 128)]),
        *((shape, "float16") for shape in [(64, 128), (256, 128)]),
    ],
)
def test_no_tile_of_the_product_spills(target, shape, dtype):
    """Ragged at both ends, with results of both widths."""
    x, weight = (jax.ShapeDtypeStruct(dims, dtype) for dims in ((584, 576), (576, 1088)))
    for out_dtype in (dtype, "float32"):
        function = lambda x, weight, out=out_dtype: matmul(x, weight, jnp.dtype(out), config=TileConfig(*shape, 3))
        with compiler_output() as output:
            target.lower(function, (x, weight)).compile()
        kernels = kernels_of(output[0])
        assert [(kernel.spilled_bytes, kernel.serialized) for kernel in kernels] == [(0, False)]
        assert [stores_before_wgmma_are_fenced(text) for text in ptx_of(output[0])] == [True]


@needs_compiler
@pytest.mark.parametrize(
    ("head_dim", "group", "page_size", "dtype", "window", "cap"),
    [
        (64, 3, 64, "bfloat16", None, None),
        (128, 4, 64, "bfloat16", None, None),
        (64, 3, 128, "float16", 1000, None),
        (64, 8, 16, "bfloat16", None, 30.0),
        (128, 4, 16, "float16", 1000, 30.0),
        (128, 1, 32, "bfloat16", 1000, None),
        (128, 8, 128, "bfloat16", None, 30.0),
        (256, 1, 64, "bfloat16", None, None),
        (256, 8, 64, "float16", None, 50.0),
        (256, 2, 16, "bfloat16", 1000, 50.0),
    ],
)
def test_the_ptx_of_attention(target, head_dim, group, page_size, dtype, window, cap):
    """What interpretation cannot see: nothing spills, queries are fenced off from the WGMMA that reads them, and both
    kernels do the same arithmetic, so that a row has the same bits in either."""
    tokens, slots, kv_heads = 136, 8, 2
    backend = mosaic_backend(mosaic_attention(head_dim=head_dim, group=group, max_model_len=gpu_compile.MAX_LEN))

    def attend(work, table, slot, position, q, pages):
        work = backend.work.unpack(work, tokens)
        prepared = backend.prepare(work, table, slot, position, num_pages=len(pages), page_size=page_size)
        return backend.attend(q, pages, prepared, scale=head_dim**-0.5, window=window, logit_soft_cap=cap)

    integers = [(backend.work.size(tokens),), (slots, gpu_compile.MAX_LEN // page_size), (tokens,), (tokens,)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers]
    for shape in ((tokens, kv_heads * group, head_dim), (1021, 2, kv_heads, page_size, head_dim)):
        arguments.append(jax.ShapeDtypeStruct(shape, dtype))
    with compiler_output() as output:
        target.lower(attend, arguments).compile()
    ptx = {kernel_name(text): text for text in ptx_of(output[0])}
    assert set(ptx) == {"paged_decode", "combine_splits", "paged_prefill"}
    kernels = kernels_of(output[0])
    assert [(kernel.spilled_bytes, kernel.serialized) for kernel in kernels] == [(0, False)] * 3
    assert arithmetic(ptx["paged_decode"]) == arithmetic(ptx["paged_prefill"])
    assert all(stores_before_wgmma_are_fenced(ptx[name]) for name in ("paged_decode", "paged_prefill"))


# ---- that the assertions can fail -----------------------------------------------------------------------


@needs_compiler
def test_a_pool_that_is_copied_is_found(target):
    pages = jax.ShapeDtypeStruct((1021, 2, 8, 64, 128), jnp.bfloat16)
    keeps_both = lambda pages: (pages, pages.at[jnp.arange(3)].set(1))
    compiled = target.lower(keeps_both, (pages,), donate=(0,)).compile()
    assert pool_copies(compiled.as_text(), 1021 * 2 * 8 * 64 * 128)


def test_every_program_of_an_engine_has_a_case():
    with tiny_engine(max_num_batched_tokens=2048, max_num_seqs=256, deterministic=False) as engine:
        names = [program.key for program in engine.runner.programs()]
    assert sorted(names) == sorted(gpu_compile.keys())


def test_every_fault_has_a_name():
    case = Case("Llama-3-8B", 2, "body", 64)
    good = Compiled(case, 1.0, 100, 100, MIB, [], ["kCommandBuffer"], {"kCustomCall": 4}, [Kernel("k", 168, 0, False)])
    assert faults(good) == []
    bad = {
        "20 donated bytes are copied": {"aliased": 80},
        "pages are copied: copy": {"pool_copies": ["copy"]},
        "65.0 MiB temporary, 64.0 are explained": {"temporary": 65 * MIB},
        "k spills": {"kernels": [Kernel("k", 168, 8, False)]},
        "a WGMMA reads what was stored without a fence": {"ptx": ("st.shared.b32\nwgmma.mma_async",)},
        "k multiplies one after the other": {"kernels": [Kernel("k", 168, 0, True)]},
        "not one command buffer: ['kCommandBuffer', 'kWhile']": {"thunks": ["kCommandBuffer", "kWhile"]},
        "our kernels are not in it: {}": {"commands": {}},
    }
    for fault, change in bad.items():
        assert faults(replace(good, **change)) == [fault]


def test_the_table_ends_with_what_is_wrong_and_the_status_says_so(monkeypatch, capsys):
    """As `make gpu-compile` runs it, with one program of two that copies what it was given."""
    good = Compiled(cases(everything=False)[0], 1.0, 4, 4, 0, [], ["kCommandBuffer"], {"kCustomCall": 4}, [])
    chosen = [replace(good.case, bucket=bucket) for bucket in (8, 16)]
    monkeypatch.setattr(gpu_compile, "unavailable", lambda: None)
    monkeypatch.setattr(gpu_compile, "Target", lambda: None)
    monkeypatch.setattr(gpu_compile, "cases", lambda everything: chosen)
    results = {8: good, 16: replace(good, case=chosen[1], aliased=0)}
    monkeypatch.setattr(gpu_compile, "inspect", lambda case, target: results[case.bucket])
    assert gpu_compile.main(["--only", "[8]"]) == 0
    assert "Not as it should be" not in capsys.readouterr().out
    assert gpu_compile.main([]) == 1
    assert capsys.readouterr().out.endswith(f"Not as it should be:\n\n- {chosen[1]}: 4 donated bytes are copied\n")


def test_what_ptxas_says_is_read():
    text = """ptxas warning : Registers are spilled in function 'a', 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    8 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 8 bytes cumulative stack size, 1 bytes smem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in function 'b'
ptxas info    : Compiling entry function 'b' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 240 registers, used 16 barriers, 1 bytes smem"""
    assert kernels_of(text) == [Kernel("a", 168, 24, False), Kernel("b", 240, 0, True)]
