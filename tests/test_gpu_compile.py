"""The engine's programs compiled for an H200 that is not there: `make test-gpu-compile`, in its own environment."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from engine_tools import tiny_engine
from ptx import arithmetic, kernel_name, stores_before_wgmma_are_fenced, stores_for_wgmma

from jaxserve.bench import gpu_compile
from jaxserve.bench.gpu_compile import MIB, Case, Compiled, Kernel, Target, cases, inspect, pool_copies, unavailable
from jaxserve.bench.models import MODELS
from jaxserve.kernels_pallas.matmul.mosaic import matmul
from jaxserve.kernels_pallas.matmul.tiles import TileConfig
from jaxserve.kernels_pallas.paged_attention import mosaic_backend
from jaxserve.kernels_pallas.paged_attention.mosaic import mosaic_attention
from jaxserve.models.config import ModelConfig

needs_compiler = pytest.mark.gpu_compile


@pytest.fixture(scope="session")
def target():
    if reason := unavailable():
        pytest.skip(reason)
    return Target()


def allowed_temporary(case: Case) -> int:
    """64 MiB, and beside them the logits, or in the larger token buckets what a layer makes of its rows: the residual
    stream and its norm, the fused products, queries and results by head, the gated product."""
    config = ModelConfig.from_hf(MODELS[case.model])
    if case.program in ("head", "masked_head", "greedy_head", "score", "score_all"):
        forms = 3 if case.program == "head" and case.bucket > 64 else 1
        return 64 * MIB + forms * 4 * case.bucket * config.vocab_size
    if case.bucket <= 64:
        return 64 * MIB
    (_, qkv), (heads, _), (_, gate_up) = (config.products[name] for name in ("qkv", "out", "gate_up"))
    widths = 3 * config.hidden_size + qkv + 3 * heads + gate_up * 3 // 2
    return 64 * MIB + case.bucket * 2 * widths


def faults(compiled: Compiled) -> list[str]:
    """What is wrong with a program."""
    case = compiled.case
    found = []
    # A proposer writes the number of drafts of every slot anew.
    made_anew = 4 * gpu_compile.BUCKETS.rows[-1] if case.program.startswith("propose") else 0
    if compiled.aliased < compiled.donated - made_anew:
        found.append(f"{compiled.donated - compiled.aliased} donated bytes are copied")
    if compiled.pool_copies:
        found.append(f"pages are copied: {compiled.pool_copies[0]}")
    if compiled.temporary > allowed_temporary(case):
        found.append(f"{compiled.temporary / MIB:.1f} MiB temporary, {allowed_temporary(case) / MIB:.1f} are explained")
    found += [f"{kernel.name} spills" for kernel in compiled.kernels if kernel.spilled_bytes]
    found += [
        "a WGMMA reads what was stored without a fence"
        for text in compiled.ptx
        if stores_for_wgmma(text) and not stores_before_wgmma_are_fenced(text)
    ]
    found += [f"{kernel.name} multiplies one after the other" for kernel in compiled.kernels if kernel.serialized]
    small = len(compiled.thunks) < 5 and set(compiled.thunks) <= {"kCustomKernel", "kCopy", "kMemset"}
    loops = case.program == "propose_by_model" and case.speculates != "medusa"  # one command buffer a draft
    loops &= compiled.thunks.count("kWhile") == 1
    if compiled.thunks != ["kCommandBuffer"] and not small and not loops:
        found.append(f"not one command buffer: {compiled.thunks}")
    if case.program == "body" and compiled.commands.get("kCustomCall", 0) < case.layers * (
        5 if case.deterministic else 1
    ):
        found.append(f"our kernels are not in it: {compiled.commands}")
    return found


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
        with gpu_compile._standard_output() as output:
            target.lower(function, (x, weight)).compile()
        kernels = gpu_compile._kernels(output[0])
        assert [(kernel.spilled_bytes, kernel.serialized) for kernel in kernels] == [(0, False)]
        assert [stores_before_wgmma_are_fenced(text) for text in gpu_compile.ptx_of(output[0])] == [True]


@needs_compiler
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 4)])
def test_the_ptx_of_attention(target, head_dim, group):
    """What interpretation cannot see: queries are fenced off from the WGMMA that reads them, and both kernels do the
    same arithmetic, so that a row has the same bits in either."""
    tokens, slots, page_size, kv_heads = 136, 8, 64, 2
    backend = mosaic_backend(mosaic_attention(head_dim=head_dim, group=group, max_model_len=gpu_compile.MAX_LEN))

    def attend(work, table, slot, position, q, pages):
        work = backend.work.unpack(work, tokens)
        prepared = backend.prepare(work, table, slot, position, num_pages=len(pages), page_size=page_size)
        return backend.attend(q, pages, prepared, scale=head_dim**-0.5)

    integers = [(backend.work.size(tokens),), (slots, gpu_compile.MAX_LEN // page_size), (tokens,), (tokens,)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers]
    for shape in ((tokens, kv_heads * group, head_dim), (1021, 2, kv_heads, page_size, head_dim)):
        arguments.append(jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    with gpu_compile._standard_output() as output:
        target.lower(attend, arguments).compile()
    ptx = {kernel_name(text): text for text in gpu_compile.ptx_of(output[0])}
    assert set(ptx) == {"paged_decode", "combine_splits", "paged_prefill"}
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
    assert gpu_compile._kernels(text) == [Kernel("a", 168, 24, False), Kernel("b", 240, 0, True)]
