"""The programs of a step: in place by the compiler's own word, and what the pool promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_tools import byte_tokenizer
from engine_tools import run, tiny_decoder, tiny_engine

from jaxserve import SamplingParams
from jaxserve.bench.gpu_compile import pool_copies
from jaxserve.cache import kv_cache
from jaxserve.cache.kv_cache import KVLayout, LayerKV
from jaxserve.runner import inputs, slots
from jaxserve.runner.step import extent

NUM_PAGES = 1021  # a prime: no other array has this shape


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "compiled"
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "max_model_len": 128, "deterministic": False}
    options |= {"num_pages": NUM_PAGES, "compilation_cache_dir": str(cache), "text": byte_tokenizer(300)}
    with tiny_engine("float32", **options) as engine:
        yield engine


def size(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


# ---- from the compiler's own analysis -------------------------------------------------------------------


def temporary_bound(engine, name: str, bucket: int) -> int:
    """What a program may need besides its arguments and results: a few copies of its activations, no pages.

    Each query row: the residual stream, the fused products and what attention makes of them. Attention: per
    head and KV block of a group of tiles. Head: the logits in a few forms. Copies: one layer's pages, twice.
    """
    config = engine.model_config
    if name == "copy_pages":
        return 2 * bucket * engine.memory_plan.page_bytes // len(engine.runner.kv)
    if name in ("admit", "set_tables"):
        return 4096
    if name == "propose_ngram":  # a few numbers for each token that a slot may hold
        return 16 * 4 * bucket * engine.runner.max_len
    if name == "propose_by_model":
        return sum(temporary_bound(engine, part, bucket) for part in ("propose_ngram", "body", "head"))
    if name in ("head", "greedy_head", "masked_head", "score", "score_all"):
        return 8 * 4 * bucket * config.vocab_size + 2**20  # the sampler's tables do not grow with the rows
    width = 4 * config.hidden_size + 4 * config.intermediate_size
    width += 8 * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    tile_rows = 16 * config.num_heads * 4 * (config.head_dim + 64) * 4  # a group of chunk tiles, one KV block
    kv_block = 2 * 8 * 2 * 64 * config.num_kv_heads * config.head_dim
    return 4 * (bucket * 2 * width + tile_rows + kv_block)


def test_every_program_works_in_place(engine):
    runner = engine.runner
    donated = {
        "body": (runner.kv, runner.slots),
        "head": runner.slots,
        "greedy_head": runner.slots,
        "masked_head": runner.slots,
        "score": (),
        "score_all": (),
        "set_tables": runner.slots,
        "admit": runner.slots,
        "copy_pages": runner.kv,
    }
    programs = runner.programs()
    assert {program.name for program in programs} == donated.keys()
    assert [program.bucket for program in programs if program.name == "body"] == [16, 8]
    for program in programs:
        compiled = runner.compiler.get(program)
        memory = compiled.memory_analysis()
        where = f"{program.name}[{program.bucket}]: {memory}"
        assert memory.alias_size_in_bytes >= size(donated[program.name]), where
        assert pool_copies(compiled.as_text(), runner.kv[0].pages.size) == []
        bound = temporary_bound(engine, *program.key)
        assert bound < size(runner.kv[0]), "a bound that a copy of a layer's pages would fit is none"
        assert memory.temp_size_in_bytes <= bound, where


@pytest.mark.parametrize(
    ("speculation", "draft", "proposes"),
    [
        ({"method": "ngram"}, None, "propose_ngram"),
        ({"method": "draft_model"}, tiny_decoder("float32", num_hidden_layers=1), "propose_by_model"),
    ],
)
def test_with_speculation_too(speculation, draft, proposes):
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "max_model_len": 128, "deterministic": False}
    options |= {"speculative_config": speculation, "draft_decoder": draft, "num_pages": NUM_PAGES}
    with tiny_engine("float32", **options) as engine:
        runner = engine.runner
        layers = 2 + (draft is not None)
        assert len(runner.kv) == layers
        donated = {"body": (runner.kv, runner.slots), "greedy_head": runner.slots}
        donated[proposes] = runner.slots if draft is None else (runner.kv, runner.slots)
        programs = {program.name: program for program in reversed(runner.programs())}
        for name, donation in donated.items():
            compiled = runner.compiler.get(programs[name])
            memory = compiled.memory_analysis()
            made_anew = runner.slots.num_drafts.nbytes if name == proposes else 0
            assert memory.alias_size_in_bytes >= size(donation) - made_anew, name
            assert pool_copies(compiled.as_text(), runner.kv[0].pages.size) == [], name
            bound = 2 * temporary_bound(engine, *programs[name].key)
            assert memory.temp_size_in_bytes <= bound < size(runner.kv[0]), (name, memory)


def test_the_search_finds_a_pool_that_is_copied(engine):
    pages = engine.runner.kv[0].pages

    def keeps_both(pages):
        return pages, pages.at[jnp.arange(3)].set(1.0)

    compiled = jax.jit(keeps_both, donate_argnums=0).lower(pages).compile()
    assert pool_copies(compiled.as_text(), pages.size)


# ---- the host's buffers ---------------------------------------------------------------------------------


def test_no_buffer_reaches_the_device_twice(engine, monkeypatch):
    """On the CPU JAX may alias a NumPy argument while the step runs: a buffer used again would change under it."""
    runner, buffers = engine.runner, []
    get = runner.compiler.get

    def recording_get(program):
        executable = get(program)

        def call(*arguments):
            buffers.extend(argument for argument in arguments if isinstance(argument, np.ndarray))
            return executable(*arguments)

        return call

    monkeypatch.setattr(runner.compiler, "get", recording_get)
    monkeypatch.setattr(runner.compiler, "get_all", lambda programs: [recording_get(program) for program in programs])
    run(engine, [(list(range(1, 20)), SamplingParams(max_tokens=6, n=2, temperature=0.5, seed=1))] * 2)
    assert len(buffers) > 15
    for index, buffer in enumerate(buffers):
        assert not any(np.shares_memory(buffer, other) for other in buffers[:index])


# ---- the pages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_write_replaces_and_reports_what_is_not_finite(dtype):
    pages = jnp.full((4, 2, 2, 8, 3), 7, dtype)
    keys = np.arange(1, 25, dtype=np.float32).reshape(4, 2, 3)
    values = -keys
    keys[1, 0, 2], values[2, 1, 0] = np.nan, -np.inf
    if dtype == "float16":
        keys[3, 1, 1] = 1e6  # finite, but not as float16
    page, offset = np.array([2, 0, 2, 3], np.int32), np.array([7, 0, 3, 1], np.int32)
    written, finite = kv_cache.write(pages, *map(jnp.asarray, (keys, values, page, offset)))
    assert finite.tolist() == [True, False, False, dtype != "float16"]
    expected = np.full(pages.shape, 7, np.float32)
    with np.errstate(over="ignore"):
        stored = np.stack([keys, values], 1).astype(np.asarray(pages).dtype).astype(np.float32)
    expected[page, :, :, offset] = np.where(np.isfinite(stored), stored, 0)
    np.testing.assert_array_equal(written.astype(jnp.float32), expected)


def test_write_drops_pages_out_of_range():
    pages = jnp.zeros((3, 2, 1, 8, 2), jnp.float32)
    ones = jnp.ones((3, 1, 2), jnp.float32).at[2].set(jnp.nan)
    page = jnp.array([3, 1, 3], jnp.int32)
    written, finite = kv_cache.write(pages, ones, ones, page, jnp.zeros(3, jnp.int32))
    assert finite.tolist() == [True, True, False]
    assert float(written.sum()) == 4
    assert float(written[1, :, :, 0].sum()) == 4


def test_copies_read_every_source_before_they_write():
    layout = KVLayout(num_layers=2, kv_heads=1, head_dim=2, page_size=8, dtype=jnp.dtype("float32"))
    numbers = jnp.arange(6, dtype=jnp.float32)[:, None, None, None, None]
    kv = tuple(LayerKV(layer.pages + numbers + 10 * index) for index, layer in enumerate(kv_cache.allocate(layout, 6)))
    sources, targets = inputs.pack_copies([(0, 1), (1, 0), (5, 2)], 5, 6)  # a swap, a copy and padding
    copied = kv_cache.copy_pages(kv, jnp.asarray(sources), jnp.asarray(targets))
    for index, layer in enumerate(copied):
        assert layer.pages[:, 0, 0, 0, 0].tolist() == [10 * index + page for page in (1, 0, 5, 3, 4, 5)]
        assert (layer.pages == layer.pages[:, :1, :1, :1, :1]).all()


def test_the_runner_copies_more_pages_than_one_call_takes(engine):
    runner = engine.runner
    marked = [layer._replace(pages=layer.pages.at[:20].set(index + 1)) for index, layer in enumerate(runner.kv)]
    runner.kv = tuple(marked)
    runner.copy_pages([(page, 100 + page) for page in range(19)])
    for index, layer in enumerate(runner.kv):
        assert (layer.pages[100:119] == index + 1).all()
        assert not (layer.pages[119:130] == index + 1).any()


# ---- padding --------------------------------------------------------------------------------------------


def test_padding_touches_neither_pages_nor_slots(engine):
    """A step of one token in a bucket of eight writes one position and advances one slot."""
    runner = engine.runner
    admission = slots.pack_admission(
        3, [5, 6], [50], 0, 0, SamplingParams(), 0, 2, None, runner.max_len, runner.max_pages
    )
    runner.admit(admission)
    kv, state = jax.device_get((runner.kv, runner.slots))
    kv, state = jax.tree.map(np.array, (kv, state))
    result = runner.run(inputs.Runs.of([(3, 0, 1, False)]), []).result()
    assert result.finite.all()
    for layer, old in zip(runner.kv, kv, strict=True):
        changed = np.argwhere((np.asarray(layer.pages) != old.pages).any((1, 2, 4)))
        assert changed.tolist() == [[50, 0]]
    for (path, old), new in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(runner.slots), strict=True):
        expected = old + (np.arange(runner.num_slots) == 3) if "num_computed" in str(path) else old
        np.testing.assert_array_equal(new, expected, err_msg=str(path))


@pytest.mark.parametrize(("real", "expected"), [("1101000", 4), ("0000", 0), ("1", 1), ("0001", 4)])
def test_products_take_all_rows_up_to_the_last_real_one(real, expected):
    """Drafts that do not exist may stand between rows that do."""
    assert extent(jnp.array([digit == "1" for digit in real])) == expected
