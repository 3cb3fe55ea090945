"""The work list of the Hopper kernels: every row once, longest first, within its bounds; and what is sent of it."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.kernels_pallas.paged_attention.mosaic.config import WHOLE, TileConfig, item_tokens, tile_tokens
from jaxserve.kernels_pallas.paged_attention.mosaic.work_list import WorkFormat, WorkList
from jaxserve.kernels_pallas.paged_attention.work_list import QueryRun, pack_runs

FORMATS = [
    WorkFormat(item_tokens=16, tile_tokens=32, max_splits=8, max_places=60, small_bucket=64, split=512),
    WorkFormat(item_tokens=16, tile_tokens=32, max_splits=8, max_places=4096, small_bucket=0, split=512),
    WorkFormat(item_tokens=3, tile_tokens=21, max_splits=8, max_places=0, small_bucket=16, split=512),
    WorkFormat(item_tokens=4, tile_tokens=5, max_splits=1, max_places=60, small_bucket=8, split=4096),
    WorkFormat(item_tokens=0, tile_tokens=32, max_splits=8, max_places=60, small_bucket=64, split=512),
]
LONGEST = 4096


def unpacked(work: WorkFormat, packed: np.ndarray, tokens: int) -> WorkList:
    return WorkList(*map(np.asarray, work.unpack(jnp.asarray(packed), tokens)))


@st.composite
def query_runs(draw):
    tokens = draw(st.sampled_from([8, 16, 64, 128, 256]))
    runs, row = [], 0
    while row < tokens and draw(st.integers(0, 9)):
        count = min(draw(st.one_of(st.just(1), st.integers(1, 17), st.integers(1, tokens))), tokens - row)
        start = draw(st.one_of(st.integers(0, LONGEST - count), st.sampled_from([0, 511, 512, 1023])))
        runs.append(QueryRun(row, min(start, LONGEST - count), count))
        row += count
    return tokens, runs


@pytest.mark.parametrize("work", FORMATS, ids=str)
def test_every_row_stands_in_one_item_or_tile(work):
    @settings(max_examples=60, deadline=None)
    @given(query_runs())
    def check(step):
        tokens, runs = step
        packed = pack_runs(work, runs, tokens)
        assert packed.dtype == np.int32
        assert packed.shape == (work.size(tokens),)
        fields = unpacked(work, packed, tokens)
        positions = {run.row + i: run.start + i for run in runs for i in range(run.count)}
        contexts, covered = check_tiles(work, fields, positions)
        assert contexts == sorted(contexts, reverse=True)
        pieces = check_items(work, fields, positions, tokens)
        covered += [row for first, count in pieces for row in range(first, first + count)]
        assert sorted(covered) == sorted(positions)
        for first, count in pieces:
            assert any(run.row <= first and first + count <= run.row + run.count for run in runs)

    check()


def check_tiles(work: WorkFormat, fields: WorkList, positions: dict[int, int]) -> tuple[list[int], list[int]]:
    """The tiles' contexts and rows."""
    tiles = list(zip(fields.tile_row, fields.tile_count, strict=True))[: int(fields.num_tiles)]
    assert all(1 <= count <= work.tile_tokens for _, count in tiles)
    assert not fields.tile_count[int(fields.num_tiles) :].any()
    contexts = [positions[int(first + count - 1)] for first, count in tiles]
    return contexts, [int(row) for first, count in tiles for row in range(first, first + count)]


def check_items(work: WorkFormat, fields: WorkList, positions: dict[int, int], tokens: int) -> list[tuple[int, int]]:
    """The pieces (row, count), each in one item or in one for each of its splits, results in places of their own."""
    number = int(fields.num_items)
    splits_of: dict[int, list[int]] = {}
    for piece, split in zip(fields.item_piece[:number], fields.item_split[:number], strict=True):
        splits_of.setdefault(int(piece), []).append(int(split))
    pieces, places, split_rows = [], [], []
    for piece, splits in splits_of.items():
        row, count = int(fields.piece_row[piece]), int(fields.piece_count[piece])
        assert 1 <= count <= work.item_tokens
        pieces.append((row, count))
        wanted = positions[row + count - 1] // work.split + 1
        assert splits in ([WHOLE], list(range(wanted)))
        if splits != [WHOLE]:
            assert wanted > 1
            first = int(fields.piece_place[piece])
            places += range(first, first + wanted * count)
            split_rows += [(row + token, piece) for token in range(count)]
    assert len(set(places)) == len(places)
    assert max(places, default=-1) < work.num_places(tokens)
    count = int(fields.num_split_rows)
    assert sorted(zip(fields.split_row[:count].tolist(), fields.split_piece[:count].tolist(), strict=True)) == sorted(
        split_rows
    )
    return pieces


def test_small_steps_have_no_tiles_and_short_contexts_no_splits():
    work = FORMATS[0]
    assert (work.num_tiles(64), work.num_tiles(128) > 0) == (0, True)
    assert FORMATS[3].num_places(64) == FORMATS[3].num_split_rows(64) == 0
    fields = unpacked(work, pack_runs(work, [QueryRun(0, 100, 40)], 64), 64)
    assert fields.piece_count[:3].tolist() == [8, 16, 16]
    assert fields.item_split[: int(fields.num_items)].tolist() == [WHOLE] * 3


def test_the_longest_are_split_while_there_is_room():
    work = FORMATS[0]  # room for 60 rows of results
    starts = [1023, 4095, 2047, 3583, 511]  # 2, 8, 4, 7 splits and 1
    runs = [QueryRun(4 * i, start - 3, 4) for i, start in enumerate(starts)]
    fields = unpacked(work, pack_runs(work, runs, 24), 24)
    items = list(zip(fields.item_piece.tolist(), fields.item_split.tolist(), strict=True))[: int(fields.num_items)]
    # 8 * 4 + 7 * 4 rows fill the room; what is whole comes first
    expected = [(2, WHOLE), (3, WHOLE), (4, WHOLE)] + [(0, i) for i in range(8)] + [(1, i) for i in range(7)]
    assert items == expected
    assert fields.piece_row[:5].tolist() == [4, 12, 8, 0, 16]


@pytest.mark.parametrize(
    ("group", "tokens"), [(1, (16, 128)), (3, (16, 42)), (4, (16, 32)), (8, (8, 16)), (16, (4, 8)), (64, (1, 2))]
)
def test_tiles_are_packed_with_query_heads(group, tokens):
    assert (item_tokens(group), tile_tokens(group, 2)) == tokens


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [({"decode_stages": 1}, "decode_stages=1: .* 2 to 8"), ({"prefill_workers": 3}, "prefill_workers=3: .* 1 or 2")],
)
def test_a_configuration_that_cannot_be_is_refused(wrong, rule):
    with pytest.raises(ValueError, match=rule):
        TileConfig(**wrong)
