"""Masks, biases, bad words, min_tokens and penalties against their definitions, token by token in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.runner import slots as slots_module
from jaxserve.sampling.processing import mask_words, process
from jaxserve.sampling.tables import MAX_BAD_WORD_TOKENS, LogitsTables, build_tables
from jaxserve.sampling_params import SamplingParams

VOCAB, SLOTS, MAX_LEN = 24, 6, 300
STOPS = {5, 6}
EVERYTHING = SamplingParams(
    repetition_penalty=1.7,
    presence_penalty=1,
    frequency_penalty=1,
    logit_bias={3: 5},
    bad_words=["1 2"],
    min_tokens=9,
)

admit = jax.jit(slots_module.admit)
set_tables = jax.jit(slots_module.set_tables)
run_process = jax.jit(process, static_argnames="branches")


def encode(text: str) -> list[int]:
    """Words are numbers; a space before the first one makes another token of it (+12)."""
    ids = [int(word) for word in text.split()]
    return [ids[0] + 12, *ids[1:]] if text.startswith(" ") else ids


def definition(logits, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """vLLM's order and formulas in float32, one token after the other."""
    logits = np.array(logits, np.float32)
    for token in range(VOCAB):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logits[token] = -np.inf
    for text in params.bad_words:
        for word in (encode(text), encode(" " + text)):
            begun = len(word) == 1 or output[-(len(word) - 1) :] == word[:-1]
            if begun:
                logits[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        logits[list(STOPS)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += np.float32(bias)
    for token in range(VOCAB):
        if token in prompt or token in output:
            factor = np.float32(params.repetition_penalty)
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        logits[token] -= np.float32(params.presence_penalty) * np.float32(token in output)
    return logits


def filled(requests) -> slots_module.Slots:
    """Slots with requests (params, prompt, output) in them, the last one first."""
    slots = slots_module.allocate(SLOTS, MAX_LEN, 2, VOCAB)
    for slot, (params, prompt, output) in reversed(list(enumerate(requests))):
        tables = build_tables(params, VOCAB, STOPS, encode)
        packed = slots_module.pack_admission(
            slot, prompt + output, [], 0, 0, params, 0, len(prompt), tables, MAX_LEN, 2
        )
        slots = admit(slots, packed)
        if tables is not None:
            slots = set_tables(slots, tables.pack(slot, VOCAB))
    return slots


def processed(requests, logits, order):
    """`process` on the requests' rows in some order, padded to 8 rows."""
    slots = filled(requests)
    rows = np.full(8, SLOTS, np.int32)
    rows[: len(order)] = order
    padded = np.zeros((8, VOCAB), np.float32)
    padded[: len(order)] = logits[order]
    positions = np.zeros(8, np.int32)
    positions[: len(order)] = [len(requests[index][1]) + len(requests[index][2]) for index in order]
    arguments = jnp.asarray(padded), slots.processing, rows, slots.history, positions
    found, without = run_process(*arguments), run_process(*arguments, branches=False)
    np.testing.assert_array_equal(without.alive, found.alive)
    np.testing.assert_allclose(without.logits, found.logits, rtol=1e-6, atol=1e-6)  # see below
    return np.asarray(found.logits), np.asarray(found.alive)


word = st.lists(st.integers(0, 11), min_size=1, max_size=4).map(lambda ids: " ".join(map(str, ids)))
some_params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.5, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 2.0]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 3.0]), max_size=4),
    allowed_token_ids=st.none() | st.just(tuple(range(1, VOCAB))) | st.just((5, *range(8, 20))),
    bad_words=st.lists(word, max_size=3).map(tuple),
    min_tokens=st.integers(0, 6),
)
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=6)
some_request = st.tuples(some_params, tokens.map(lambda ids: [3, *ids]), tokens)


@settings(max_examples=50, deadline=None)
@given(st.lists(some_request, min_size=1, max_size=SLOTS), st.randoms(use_true_random=False))
def test_every_row_is_its_own_definition_bit_for_bit(requests, source):
    logits = np.random.default_rng(source.randrange(2**31)).normal(size=(len(requests), VOCAB)).astype(np.float32) * 4
    order = source.sample(range(len(requests)), len(requests))
    found, alive = processed(requests, logits, order)
    for row, index in enumerate(order):
        expected = definition(logits[index], *requests[index])
        # XLA may contract a product and a sum into one rounding.
        assert alive[row] == np.isfinite(expected).any()
        if alive[row]:
            np.testing.assert_allclose(found[row], expected, rtol=1e-6, atol=1e-6)
    for row, index in enumerate(order):  # alone: the same bits
        alone, _ = processed(requests, logits, [index])
        np.testing.assert_array_equal(alone[0], found[row])
    assert not found[len(order) :].any(), "padding is left as it is"


def test_a_request_that_asks_for_nothing_keeps_its_bits_beside_one_that_asks_for_everything():
    requests = [(SamplingParams(), [1, 2], [3, 3]), (EVERYTHING, [1, 2], [3, 1])]
    logits = np.random.default_rng(0).normal(size=(2, VOCAB)).astype(np.float32)
    found, _ = processed(requests, logits, [0, 1])
    np.testing.assert_array_equal(found[0], logits[0])
    assert (found[1] != logits[1]).any()


def test_long_histories_are_counted_to_the_end():
    prompt, output = [1] * 130, [2] * 129 + [4]
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2)
    logits = np.ones((1, VOCAB), np.float32)
    found, _ = processed([(params, prompt, output)], logits, [0])
    expected = np.ones(VOCAB, np.float32)
    expected[[1, 2, 4]] = 0.5
    expected[2] -= 129 * 0.5 + 0.25
    expected[4] -= 0.5 + 0.25
    np.testing.assert_array_equal(found[0], expected)


def test_a_bad_word_does_not_begin_in_the_prompt():
    params = SamplingParams(bad_words=["7 8"])
    logits = np.zeros((1, VOCAB), np.float32)
    assert np.isfinite(processed([(params, [7], [])], logits, [0])[0][0]).all()
    assert processed([(params, [1], [7])], logits, [0])[0][0, 8] == -np.inf


def test_no_token_left_is_told():
    params = SamplingParams(bad_words=["9 9"], allowed_token_ids=(9, 21))
    found, alive = processed([(params, [1], [9])], np.zeros((1, VOCAB), np.float32), [0])
    assert alive[0]  # 21 is left
    params = SamplingParams(bad_words=["9 9"], allowed_token_ids=(9,))
    found, alive = processed([(params, [1], [9])], np.zeros((1, VOCAB), np.float32), [0])
    assert not alive[0]
    assert np.isfinite(found[0]).any(), "the sampler gets a number"
    assert alive[1:].all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bad_words": ["1 " * 17]}, f"bad_words must be texts of at most {MAX_BAD_WORD_TOKENS} tokens"),
        ({"bad_words": [f"{i % 12} {i // 12}" for i in range(70)]}, "bad_words must be at most 128 sequences"),
        ({"bad_words": ["9"], "allowed_token_ids": [9, 21]}, "bad_words must be such that some token is still allowed"),
        ({"allowed_token_ids": [5, 6], "min_tokens": 1}, "allowed_token_ids must be such that tokens other than"),
    ],
)
def test_what_cannot_be_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        build_tables(SamplingParams(**values), VOCAB, STOPS, encode)


def test_more_stop_tokens_than_a_slot_holds_are_refused_with_min_tokens_only():
    many = set(range(65))
    with pytest.raises(ValueError, match="stop_token_ids must be at most 64 ids"):
        build_tables(SamplingParams(min_tokens=1), 1000, many, encode)
    assert build_tables(SamplingParams(), 1000, many, encode) is None
    assert isinstance(build_tables(SamplingParams(logit_bias={1: 1}), 1000, many, encode), LogitsTables)


def test_works_under_x64():
    requests = [(EVERYTHING, [1, 2], [3, 1]), (SamplingParams(), [1], [2])]
    logits = np.random.default_rng(0).normal(size=(2, VOCAB)).astype(np.float32)
    expected, _ = processed(requests, logits, [0, 1])
    with jax.enable_x64(True):
        found, alive = processed(requests, logits, [0, 1])
    np.testing.assert_array_equal(found, expected)
    assert (found.dtype, alive.dtype) == (np.float32, np.bool_)


@pytest.mark.parametrize("vocab", [31, 32, 300])
def test_masks_of_bits(vocab):
    source = np.random.default_rng(vocab)
    logits = source.normal(size=(5, vocab)).astype(np.float32)
    allowed = source.random((5, vocab)) < 0.3
    allowed[0], allowed[1] = True, False
    masks = np.zeros((5, mask_words(vocab)), np.uint32)
    for row, token in zip(*allowed.nonzero(), strict=True):
        masks[row, token // 32] |= np.uint32(1 << (token % 32))
    slots = slots_module.allocate(SLOTS, MAX_LEN, 2, vocab)
    rows = jnp.array([0, 1, 2, 3, SLOTS], jnp.int32)  # the last is padding
    processed = run_process(logits, slots.processing, rows, slots.history, jnp.zeros(5, jnp.int32), masks)
    expected = np.where(allowed, logits, -np.inf)
    alive = [True, False, True, True, True]
    np.testing.assert_array_equal(processed.logits[np.array(alive)], expected[alive])
    assert processed.alive.tolist() == alive
