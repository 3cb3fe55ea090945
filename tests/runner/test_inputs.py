"""What the host packs is what the device unpacks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.kernels_pallas.paged_attention.work_list import TILES, QueryRun, pack_runs
from jaxserve.runner import slots
from jaxserve.runner.inputs import (
    Runs,
    ScoreRow,
    body_inputs_size,
    pack_body,
    pack_copies,
    pack_drafts,
    pack_head,
    pack_score,
    unpack_body,
    unpack_drafts,
)
from jaxserve.sampling.tables import LogitsTables
from jaxserve.sampling_params import SamplingParams, seed_words

NUM_SLOTS, MAX_HEAD_ROWS = 12, 40


class Run(NamedTuple):
    slot: int
    start: int
    count: int
    sample: bool
    drafts: int = 0


@st.composite
def plans(draw):
    """(tokens, runs, new pages): at most one run a slot, at most `tokens` query rows and new pages."""
    tokens = draw(st.sampled_from([8, 16, 40]))
    order = draw(st.permutations(range(NUM_SLOTS)))
    runs, left = [], tokens
    for slot in order[: draw(st.integers(1, NUM_SLOTS))]:
        count = min(draw(st.one_of(st.just(1), st.integers(1, tokens))), left)
        if count:
            sample = draw(st.booleans())
            drafts = min(draw(st.integers(0, 7)), left - count) if sample else 0
            runs.append(Run(slot, draw(st.integers(0, 300)), count, sample, drafts))
            left -= drafts
        left -= count
    page = st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, 30), st.integers(0, 99))
    return tokens, runs, draw(st.lists(page, max_size=tokens))


@settings(max_examples=60, deadline=None)
@given(plans())
def test_a_body_s_inputs_say_which_row_is_which(plan):
    tokens, runs, new_pages = plan
    packed = pack_body(Runs.of(runs), new_pages, tokens, NUM_SLOTS, TILES)
    assert packed.dtype == np.int32
    assert packed.shape == (body_inputs_size(tokens, TILES),)
    inputs = unpack_body(jnp.asarray(packed), tokens, TILES)
    rows = [
        (run.slot, offset, max(offset - run.count + 1, 0)) for run in runs for offset in range(run.count + run.drafts)
    ]
    padding = [(NUM_SLOTS, 0, 0)] * (tokens - len(rows))
    columns = inputs.token_slot.tolist(), inputs.token_offset.tolist(), inputs.token_draft.tolist()
    assert list(zip(*columns, strict=True)) == rows + padding

    # The head gets the last row of each run that samples and those of its drafts, in the order of the runs.
    samples = {run.slot: run.count - 1 for run in runs if run.sample}
    sampled = [
        [row, slot, draft] for row, (slot, offset, draft) in enumerate(rows) if offset >= samples.get(slot, tokens)
    ]
    head = pack_head(Runs.of(runs), MAX_HEAD_ROWS, NUM_SLOTS)
    assert head.T.tolist() == sampled + [[0, NUM_SLOTS, 0]] * (MAX_HEAD_ROWS - len(sampled))

    drafts = unpack_drafts(jnp.asarray(pack_drafts(Runs.of(runs), new_pages, 16, tokens, NUM_SLOTS)), 16, tokens)
    wanted = sorted(((run.drafts, run.slot) for run in runs if run.drafts), key=lambda pair: -pair[0])
    assert drafts.wanted.tolist() == [count for count, _ in wanted] + [0] * (16 - len(wanted))
    assert sorted(zip(drafts.wanted.tolist(), drafts.slots.tolist(), strict=True))[16 - len(wanted) :] == sorted(wanted)
    for name in ("new_page_slot", "new_page_index", "new_page"):
        np.testing.assert_array_equal(getattr(drafts, name), getattr(inputs, name))

    updates = zip(inputs.new_page_slot, inputs.new_page_index, inputs.new_page, strict=True)
    updates = [tuple(map(int, update)) for update in updates]
    assert updates[: len(new_pages)] == new_pages
    assert all(slot == NUM_SLOTS for slot, _, _ in updates[len(new_pages) :])

    counts = [run.count + run.drafts for run in runs]
    firsts = np.cumsum([0, *counts]).tolist()
    query_runs = [QueryRun(first, run.start, count) for first, run, count in zip(firsts, runs, counts, strict=False)]
    expected = TILES.unpack(jnp.asarray(pack_runs(TILES, query_runs, tokens)), tokens)
    for name, part, wanted in zip(expected._fields, inputs.work, expected, strict=True):
        np.testing.assert_array_equal(part, wanted, err_msg=name)


def test_every_pack_is_a_buffer_of_its_own():
    params = SamplingParams()
    packs = [
        lambda: pack_body(Runs.of([(0, 0, 3, True)]), [], 8, NUM_SLOTS, TILES),
        lambda: pack_head(Runs.of([(1, 0, 1, True)]), 8, NUM_SLOTS),
        lambda: pack_score([ScoreRow(1, 2, 3)], 8),
        lambda: pack_copies([(1, 2)], 8, 10),
        lambda: slots.pack_admission(0, [1], [0], 0, 0, params, 0, 1, None, 16, 2),
    ]
    for pack in packs:
        first, second = pack(), pack()
        np.testing.assert_array_equal(first, second)
        assert not np.shares_memory(first, second)


def test_heads_and_copies_are_padded_out_of_range():
    runs = [(3, 0, 4, True), (2, 0, 1, False), (1, 9, 2, True)]
    assert pack_head(Runs.of(runs), 8, NUM_SLOTS).tolist() == [[3, 6] + [0] * 6, [3, 1] + [NUM_SLOTS] * 6, [0] * 8]
    drafted = [(3, 0, 4, True, 2), (2, 0, 1, False, 0), (1, 9, 2, True, 0)]
    assert pack_head(Runs.of(drafted), 8, NUM_SLOTS).tolist() == [
        [3, 4, 5, 8] + [0] * 4,
        [3, 3, 3, 1] + [NUM_SLOTS] * 4,
        [0, 1, 2] + [0] * 5,
    ]
    assert pack_score([ScoreRow(4, 70, 0), ScoreRow(5, 71, 3)], 4).tolist() == [
        [4, 5, 0, 0],
        [70, 71, 0, 0],
        [0, 3, -1, -1],
    ]
    assert pack_copies([(4, 5), (6, 7)], 4, 10).tolist() == [[4, 6, 10, 10], [5, 7, 10, 10]]


@settings(max_examples=15, deadline=None)
@given(
    slot=st.integers(0, 3),
    token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12),
    pages=st.lists(st.integers(0, 99), max_size=3),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.none() | st.integers(-1, 20),
    top_k=st.integers(-1, 50),
    values=st.tuples(*[st.floats(0, 1, width=32)] * 3),
)
def test_an_admission_fills_its_slot_and_no_other(slot, token_ids, pages, seed, logprobs, top_k, values):
    temperature, top_p, min_p = values
    asked = {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.25, "min_tokens": 2}
    params = SamplingParams(
        temperature=temperature, top_p=top_p or 1.0, min_p=min_p, top_k=top_k, logprobs=logprobs, **asked
    )
    num_computed, write_start, vocab = len(token_ids) - 1, len(token_ids) // 2, 40
    tables = LogitsTables(np.arange(vocab, dtype=np.float32), [[7, 8], [4, 5, 6]], [9])
    packed = slots.pack_admission(slot, token_ids, pages, num_computed, write_start, params, seed, 5, tables, 12, 3)
    before = jax.tree.map(lambda array: array + jnp.ones((), array.dtype), slots.allocate(4, 12, 3, vocab))
    after = slots.set_tables(slots.admit(before, jnp.asarray(packed)), jnp.asarray(tables.pack(slot, vocab)))
    others = np.array([index for index in range(4) if index != slot])
    for (name, old), new in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
        assert (old.dtype, old.shape) == (new.dtype, new.shape), name
        old, new = (array[0] if "page_table" in str(name) else array for array in (old, new))
        np.testing.assert_array_equal(old[others], new[others], err_msg=str(name))
    assert after.history[slot].tolist() == token_ids + [0] * (12 - len(token_ids))
    assert after.page_table[0, slot].tolist() == pages + [0] * (3 - len(pages))
    assert (int(after.num_computed[slot]), int(after.write_start[slot])) == (num_computed, write_start)
    assert after.temperature[slot] == np.float32(temperature)
    assert after.top_p[slot] == np.float32(top_p or 1.0)
    assert after.min_p[slot] == np.float32(min_p)
    assert int(after.top_k[slot]) == max(top_k, 0)
    assert int(after.num_logprobs[slot]) == (-1 if logprobs is None else max(logprobs, 0))
    assert tuple(after.seed[slot].tolist()) == seed_words(seed)
    mine = jax.tree.map(lambda array: array[slot].tolist(), after.processing)
    assert (mine.repetition, mine.presence, mine.frequency) == (1.5, -0.5, 0.25)
    assert (mine.prompt_length, mine.min_length, mine.has_bias, mine.num_bad_words) == (5, 7, True, 2)
    assert mine.bias == list(range(vocab))
    assert [word[-4:] for word in mine.bad_words[:3]] == [[-1, -1, 7, 8], [-1, 4, 5, 6], [-1] * 4]
    assert mine.stop_ids == [9] + [vocab] * 63


@pytest.mark.parametrize("tokens", [8, 16, 64])
def test_a_step_may_be_full(tokens):
    packed = pack_body(Runs.of([(2, 5, tokens, True)]), [], tokens, NUM_SLOTS, TILES)
    inputs = unpack_body(jnp.asarray(packed), tokens, TILES)
    assert inputs.token_slot.tolist() == [2] * tokens
