"""Paged attention: all backends against float64, and the bits of a row whatever stands beside it."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import ATTENTION_BACKENDS
from jaxserve.kernels_pallas.paged_attention import REFERENCE, XLA, choose_attention
from jaxserve.kernels_pallas.paged_attention.work_list import (
    CHUNK_GROUP,
    CHUNK_ROWS,
    MIN_CHUNK_ROWS,
    SINGLE_GROUP,
    TILES,
    QueryRun,
    WorkList,
    num_chunk_tiles,
    pack_runs,
)
from jaxserve.kernels_pallas.paged_attention.xla import KV_BLOCK

NATIVE = choose_attention("auto")  # where there is no compiler this is XLA again
SLOTS = 5
LONGEST = 256  # positions of a sequence: four KV blocks


class Shape(NamedTuple):
    """What a program is compiled for. Compiling is what costs here, so the tests share few programs."""

    tokens: int
    page_size: int
    kv_heads: int
    group: int
    head_dim: int
    dtype: str
    window: int | None = None


# Every bucket and groups of 1, 2 and 8, with windows under, of about and over a KV block.
AGAINST_FLOAT64 = [
    Shape(8, 16, 2, 1, 16, "float32", window=70),
    Shape(16, 128, 1, 8, 8, "float32", window=5),
    Shape(32, 8, 2, 2, 24, "float32"),
    Shape(64, 32, 2, 1, 16, "float32", window=70),
]
# A family has one model; the first program is the one in which a row is computed alone. Buckets of 16 have
# chunk tiles too.
BIT_FAMILIES = {
    "bfloat16": [
        *(Shape(tokens, 16, 3, 3, 64, "bfloat16") for tokens in (8, 16, 64)),
        *(Shape(16, page_size, 3, 3, 64, "bfloat16") for page_size in (8, 128)),
        *(Shape(8, page_size, 3, 3, 64, "bfloat16") for page_size in (32, 64)),
    ],
    "bfloat16-group-8": [Shape(tokens, 16, 1, 8, 32, "bfloat16", window=70) for tokens in (8, 32)],
    "float32": [AGAINST_FLOAT64[0], AGAINST_FLOAT64[3]],
}


class Chunk(NamedTuple):
    """`count` query rows of a sequence from position `start` on."""

    slot: int
    start: int
    count: int


class Sequences(NamedTuple):
    """What the pages are filled with, per slot and position."""

    q: np.ndarray  # [SLOTS, LONGEST, heads, head_dim]
    kv: np.ndarray  # [2, SLOTS, LONGEST, kv_heads, head_dim]


@cache
def sequences(kv_heads: int, group: int, head_dim: int, dtype: str) -> Sequences:
    random = np.random.default_rng(1)
    q = random.standard_normal((SLOTS, LONGEST, kv_heads * group, head_dim)) * 2
    kv = random.standard_normal((2, SLOTS, LONGEST, kv_heads, head_dim))
    return Sequences(q.astype(jnp.dtype(dtype)), kv.astype(jnp.dtype(dtype)))


def data_of(shape: Shape) -> Sequences:
    return sequences(shape.kv_heads, shape.group, shape.head_dim, shape.dtype)


def pool(kv: np.ndarray, page_size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(pages, page_table): every sequence on pages of its own in a random order; some pages nobody owns."""
    _, slots, positions, kv_heads, head_dim = kv.shape
    per_slot = positions // page_size
    num_pages = slots * per_slot + 3
    table = np.random.default_rng(seed).permutation(num_pages)[: slots * per_slot].reshape(slots, per_slot)
    pages = np.zeros((num_pages, 2, kv_heads, page_size, head_dim), kv.dtype)
    parts = kv.reshape(2, slots, per_slot, page_size, kv_heads, head_dim)
    pages[table] = parts.transpose(1, 2, 0, 4, 3, 5)
    return pages, table.astype(np.int32)


@cache
def clean_pool(shape: Shape) -> tuple[jax.Array, jax.Array]:
    return jax.device_put(pool(data_of(shape).kv, shape.page_size))


def rows_of(chunks: list[Chunk], tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(packed work list, slot of each row, position of each row), padded to `tokens` rows."""
    slot, position = np.full(tokens, SLOTS, np.int32), np.full(tokens, -1, np.int32)
    runs, row = [], 0
    for chunk in chunks:
        runs.append(QueryRun(row, chunk.start, chunk.count))
        slot[row : row + chunk.count] = chunk.slot
        position[row : row + chunk.count] = chunk.start + np.arange(chunk.count)
        row += chunk.count
    return pack_runs(TILES, runs, tokens), slot, position


@partial(jax.jit, static_argnames=("backend", "tokens", "window"))
def attend(backend, tokens, window, q, pages, table, work, slot, position):
    prepared = backend.prepare(
        TILES.unpack(work, tokens),
        table,
        slot,
        position,
        num_pages=pages.shape[0],
        page_size=pages.shape[3],
    )
    return backend.attend(q, pages, prepared, scale=q.shape[-1] ** -0.5, window=window)


def run(backend, shape: Shape, chunks, pages=None, table=None) -> np.ndarray:
    """The results of the scheduled rows, in their order."""
    data = data_of(shape)
    if pages is None:
        pages, table = clean_pool(shape)
    work, slot, position = rows_of(chunks, shape.tokens)
    # Padding rows hold queries too: whatever stands there must not matter.
    q = data.q[np.minimum(slot, SLOTS - 1), position]
    out = attend(backend, shape.tokens, shape.window, q, pages, table, work, slot, position)
    return np.asarray(out)[: sum(chunk.count for chunk in chunks)]


def oracle(shape: Shape, chunks: list[Chunk]) -> np.ndarray:
    """Softmax attention in float64, row by row from the definition."""
    data, window = data_of(shape), shape.window
    heads, head_dim = data.q.shape[2:]
    kv_heads = data.kv.shape[3]
    out = []
    for slot, start, count in chunks:
        for position in range(start, start + count):
            first = 0 if window is None else max(position + 1 - window, 0)
            keys, values = data.kv[:, slot, first : position + 1].astype(np.float64)
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                scores = keys[:, kv_head] @ data.q[slot, position, head].astype(np.float64) * head_dim**-0.5
                weights = np.exp(scores - scores.max())
                out.append(weights @ values[:, kv_head] / weights.sum())
    return np.array(out).reshape(-1, heads, head_dim)


@st.composite
def steps(draw, tokens: int):
    """Decode rows and prompt chunks of different sequences, in any order, that fit a bucket."""
    edges = st.sampled_from([0, 1, 62, 63, 64, 65, 127, 128, 190, 255])
    chunks, left = [], tokens
    for slot in draw(st.permutations(range(SLOTS))):
        count = min(draw(st.one_of(st.just(1), st.integers(1, tokens))), left)
        if count:
            start = draw(st.one_of(edges, st.integers(0, LONGEST - 1)))
            chunks.append(Chunk(slot, min(start, LONGEST - count), count))
        left -= count
    return chunks


# ---- against the definition -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", AGAINST_FLOAT64, ids=str)
def test_all_backends_agree_with_float64(shape):
    @settings(max_examples=6, deadline=None)
    @given(steps(shape.tokens), st.integers(0, 9))
    def check(chunks, seed):
        expected = oracle(shape, chunks)
        pages, table = pool(data_of(shape).kv, shape.page_size, seed)
        for backend in (XLA, NATIVE, REFERENCE):
            out = run(backend, shape, chunks, pages, table)
            np.testing.assert_allclose(out, expected, rtol=1e-4, atol=4e-6, err_msg=backend.name)

    check()


def test_bfloat16_stays_within_its_precision():
    shape, chunks = BIT_FAMILIES["bfloat16"][2], [Chunk(0, 100, 40), Chunk(1, 200, 1), Chunk(2, 0, 9)]
    expected = oracle(shape, chunks)
    for backend in (XLA, NATIVE, REFERENCE):
        out = run(backend, shape, chunks).astype(np.float64)
        np.testing.assert_allclose(out, expected, rtol=0, atol=0.02, err_msg=backend.name)


@pytest.mark.parametrize("backend", [REFERENCE, NATIVE], ids=["reference", "native"])
def test_padding_rows_are_zeros(backend):
    shape = AGAINST_FLOAT64[0]
    data = data_of(shape)
    work, slot, position = rows_of([Chunk(0, 3, 2)], 8)
    pages, table = pool(data.kv, shape.page_size)
    out = np.asarray(attend(backend, 8, shape.window, data.q[0, :8], pages, table, work, slot, position))
    assert out[:2].all()
    assert not out[2:].any()


def test_names_choose_backends():
    names = {name: choose_attention(name).name for name in ATTENTION_BACKENDS if name != "mosaic"}
    assert names == {"auto": "native", "xla": "xla", "reference": "reference", "native": "native"}
    assert choose_attention("auto", head_dim=12).name == "xla"
    with pytest.raises(ValueError, match=r"^attention_backend='native': .*head_dim=12 is no multiple of 8"):
        choose_attention("native", head_dim=12)


# ---- the bits of a row ----------------------------------------------------------------------------------


@pytest.fixture(params=[XLA, NATIVE], ids=["xla", "native"])
def backend(request):
    return request.param


@cache
def alone(backend, shape: Shape, slot: int, position: int) -> bytes:
    """The bits of a row that is the only one of its step."""
    return run(backend, shape, [Chunk(slot, position, 1)]).tobytes()


def assert_bits(backend, family: str, shape: Shape, chunks: list[Chunk], out: np.ndarray) -> None:
    rows = [(slot, position) for slot, start, n in chunks for position in range(start, start + n)]
    for row, (slot, position) in zip(out, rows, strict=True):
        if row.tobytes() != alone(backend, BIT_FAMILIES[family][0], slot, position):
            pytest.fail(f"slot {slot}, position {position} of {chunks} has other bits in {shape} than alone")


@pytest.mark.parametrize(
    ("family", "shape"), [(name, shape) for name, shapes in BIT_FAMILIES.items() for shape in shapes], ids=str
)
def test_a_row_has_the_same_bits_alone_and_in_company(backend, family, shape):
    """In every bucket, for every page size, as a single tile and within a chunk tile, beside any others."""

    @settings(max_examples=4, deadline=None)
    @given(steps(shape.tokens))
    def check(chunks):
        assert_bits(backend, family, shape, chunks, run(backend, shape, chunks))

    check()
    count = min(shape.tokens, 21)  # one row, all of them in one run, a run ending in single tiles
    for chunks in [
        [Chunk(0, 64, 1)],
        [Chunk(1, LONGEST - shape.tokens, shape.tokens)],
        [Chunk(2, 50, count)],
    ]:
        assert_bits(backend, family, shape, chunks, run(backend, shape, chunks))


@pytest.mark.parametrize("family", BIT_FAMILIES)
@pytest.mark.parametrize("huge", [1e37, -3e38])
def test_junk_in_pages_positions_and_tables_changes_nothing(backend, family, huge):
    """Unowned pages, positions behind the context and unused table entries may hold anything finite."""
    shape = max(BIT_FAMILIES[family], key=lambda shape: shape.tokens)
    chunks = [Chunk(0, 100, 20), Chunk(1, 63, 1), Chunk(2, 64, 1), Chunk(3, 0, 9)]
    kv = data_of(shape).kv.copy()
    for slot, start, count in chunks:
        kv[:, slot, start + count :] = huge
    kv[:, 4] = huge  # nobody's
    pages, table = pool(kv, shape.page_size)
    pages[~np.isin(np.arange(len(pages)), table)] = huge
    for slot, start, count in chunks:
        used = -(-(start + count) // shape.page_size)
        table[slot, used:] = np.resize([-1, 2**31 - 1, -(2**31), len(pages)], table.shape[1] - used)
    table[4] = -7
    clean, expected = run(backend, shape, chunks), oracle(shape, chunks)
    assert run(backend, shape, chunks, pages, table).tobytes() == clean.tobytes()
    if shape.dtype == "float32":
        np.testing.assert_allclose(run(REFERENCE, shape, chunks, pages, table), expected, rtol=1e-4, atol=4e-6)


# ---- the work list --------------------------------------------------------------------------------------


@st.composite
def query_runs(draw):
    """(tokens, runs): runs stand behind one another, as the step packs them."""
    tokens = draw(st.integers(1, 16)) * 8
    runs, row = [], 0
    for count in draw(st.lists(st.integers(1, 40), min_size=1, max_size=tokens)):
        count = min(count, tokens - row)
        if count:
            runs.append(QueryRun(row, draw(st.integers(0, 500)), count))
            row += count
    return tokens, runs


def test_the_worst_case_of_chunk_tiles_fits():
    for tokens in range(8, 257, 8):
        runs = [QueryRun(row, 0, MIN_CHUNK_ROWS) for row in range(0, tokens, MIN_CHUNK_ROWS)]
        assert len(pack_runs(TILES, runs, tokens)) == TILES.size(tokens)


def num_blocks(starts: list[int], counts: list[int]) -> int:
    """The KV blocks that XLA's loops compute for the runs of a step, those of padding and of neighbours included."""
    tokens = -(-sum(counts) // 8) * 8
    runs, row = [], 0
    for start, count in zip(starts, counts, strict=True):
        runs.append(QueryRun(row, start, count))
        row += count
    positions = np.zeros(tokens, np.int32)
    positions[:row] = np.concatenate([run.start + np.arange(run.count) for run in runs])
    slots = np.zeros(tokens, np.int32)
    slots[:row] = np.repeat(np.arange(len(runs)), counts)
    table = np.zeros((len(runs), 2048 // 16), np.int32)
    work = TILES.unpack(jnp.asarray(pack_runs(TILES, runs, tokens)), tokens)
    arrays = map(jnp.asarray, (table, slots, positions))
    prepared = XLA.prepare(work, *arrays, num_pages=8, page_size=16)
    total = 0
    for tiles in (prepared.singles, prepared.chunks):
        latest = np.asarray(tiles.latest)[: int(tiles.num_groups)]
        total += tiles.rows.shape[1] * int((latest // KV_BLOCK + 1).sum())
    return total


@pytest.mark.parametrize("place", [0, 17, 31])
def test_the_work_follows_the_sum_of_the_contexts(place):
    """One long context among 31 short ones costs the seven beside it in its group, and nobody else."""
    contexts = [20 + 3 * index for index in range(31)]
    contexts.insert(place, 2040)
    exact = sum(-(-context // KV_BLOCK) for context in contexts)
    found = num_blocks([context - 1 for context in contexts], [1] * 32)
    assert exact <= found <= exact + (SINGLE_GROUP - 1) * 32  # 32 blocks hold the 2,040
    assert found <= 4 * exact
    assert found <= 32 * 32 / 3, "batch times the longest is far more"


@settings(max_examples=20, deadline=None)
@given(st.permutations([*range(7, 1500, 60), *[2040] * 7]))
def test_mixed_contexts_cost_hardly_more_than_their_sum(contexts):
    """A group is as long as its longest, and no longer than any of the group before: only the first is not paid for."""
    exact = sum(-(-context // KV_BLOCK) for context in contexts)
    found = num_blocks([context - 1 for context in contexts], [1] * len(contexts))
    assert exact <= found <= 1.3 * exact
    assert found < 0.7 * len(contexts) * 32


@settings(max_examples=60, deadline=None)
@given(query_runs())
def test_every_row_stands_in_one_tile_and_tiles_are_sorted_by_context(step):
    tokens, runs = step
    packed = pack_runs(TILES, runs, tokens)
    assert packed.dtype == np.int32
    assert packed.shape == (TILES.size(tokens),)
    work = WorkList(*map(np.asarray, TILES.unpack(jnp.asarray(packed), tokens)))
    position = {run.row + i: run.start + i for run in runs for i in range(run.count)}
    singles = [int(row) for row in work.single_rows if row < tokens]
    assert (work.single_rows[len(singles) :] == tokens).all()  # padding stands behind
    chunks = [(int(a), int(n)) for a, n in zip(work.chunk_first, work.chunk_count, strict=True) if n]
    assert not work.chunk_count[len(chunks) :].any()
    assert all(MIN_CHUNK_ROWS <= count <= CHUNK_ROWS for _, count in chunks)

    # Every row exactly once; a chunk's rows are consecutive positions of one run.
    covered = singles + [row for first, count in chunks for row in range(first, first + count)]
    assert sorted(covered) == sorted(position)
    for first, count in chunks:
        assert any(run.row <= first and first + count <= run.row + run.count for run in runs)

    # Longest context first, in groups of whole size that hold all tiles and no empty group.
    contexts = [position[row] for row in singles]
    assert contexts == sorted(contexts, reverse=True)
    contexts = [position[first + count - 1] for first, count in chunks]
    assert contexts == sorted(contexts, reverse=True)
    assert int(work.single_groups) == -(-len(singles) // SINGLE_GROUP)
    assert int(work.chunk_groups) == -(-len(chunks) // CHUNK_GROUP)
    assert work.single_rows.shape[0] % SINGLE_GROUP == 0
    assert work.chunk_first.shape == (num_chunk_tiles(tokens),)
    assert num_chunk_tiles(tokens) % CHUNK_GROUP == 0

    # `place` leads each row to its own result: singles in their order, then CHUNK_ROWS places a chunk tile.
    results = dict(enumerate(singles))
    for tile, (first, count) in enumerate(chunks):
        results |= {tokens + tile * CHUNK_ROWS + i: first + i for i in range(count)}
    assert {row: results[int(work.place[row])] for row in position} == {row: row for row in position}
