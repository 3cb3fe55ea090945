"""Verification of drafts: agreement gives the sampler's own tokens, rejection the target's distribution."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from jaxserve.kernels_pallas.verify_draft.logprobs import logprobs
from jaxserve.kernels_pallas.verify_draft.reference import RULES, verify_draft
from jaxserve.kernels_pallas.verify_draft.sampler import SamplingRows, sample
from jaxserve.sampling_params import SamplingParams
from tests.kernels.verify_tools import KINDS, make_case
from tests.sampling.helpers import by_candidates, exact_distribution, rows_of

# The whole family of chi-square tests fails by chance with this probability (Bonferroni); seeds are fixed.
FAMILY_ALPHA = 1e-3
ROWS, WIDTH, VOCAB = 16, 4, 300  # of most tests: each shape is a compilation
compute = jax.jit(logprobs, static_argnums=2)
WAYS = [("agreement", "sampled"), ("rejection", "certain"), ("rejection", "sampled")]
verify = jax.jit(verify_draft, static_argnames=("rule", "max_logprobs", "candidates"))


def test_agreement_accepts_what_the_sampler_gives_and_continues_with_it():
    case = make_case(ROWS, WIDTH, VOCAB)
    found = verify(*case.arguments)
    for row in range(ROWS):
        drafts = case.draft_tokens[row, : case.num_drafts[row]]
        agrees = drafts == case.samples[row, : len(drafts)]
        accepted = len(drafts) if agrees.all() else int(agrees.argmin())
        assert found.num_accepted[row] == accepted
        assert found.next_token[row] == case.samples[row, accepted]
        expected = [*case.samples[row, : accepted + 1], *[-1] * (WIDTH - 1 - accepted)]
        assert found.tokens[row].tolist() == expected
    assert 0 < int(found.num_accepted.sum()) < int(case.num_drafts.sum())


@pytest.mark.parametrize("rule", RULES)
def test_without_drafts_it_is_the_sampler(rule):
    case = make_case(ROWS, 1, VOCAB)
    found = verify(*case.arguments, rule=rule)
    np.testing.assert_array_equal(found.next_token, case.samples[:, 0])
    np.testing.assert_array_equal(found.tokens, case.samples)
    assert not found.num_accepted.any()
    idle = make_case(ROWS, WIDTH, VOCAB)._replace(num_drafts=np.zeros(ROWS, np.int32))
    found = verify(*idle.arguments, rule=rule)
    np.testing.assert_array_equal(found.next_token, idle.samples[:, 0])


@pytest.mark.parametrize(("rule", "drafter"), WAYS)
def test_a_rows_result_does_not_depend_on_the_others(rule, drafter):
    case, other = make_case(ROWS, WIDTH, VOCAB), make_case(ROWS, WIDTH, VOCAB, spread=0.3, seed=9)
    noise = np.random.default_rng(5).normal(size=(ROWS, WIDTH - 1, VOCAB)).astype(np.float32)
    proposed = lambda case: case.logits[:, :-1] + noise if drafter == "sampled" else None
    together = verify(*case.arguments, rule=rule, draft_logits=proposed(case))
    order = np.random.default_rng(1).permutation(ROWS)
    mine = np.arange(ROWS) % 3 == 0  # elsewhere, among rows that are not the same
    mix = lambda leaf, alien: np.where(mine.reshape(-1, *[1] * (leaf.ndim - 1)), np.asarray(leaf)[order], alien)
    mixed = jax.tree.map(mix, case.arguments, other.arguments)
    draft_logits = None if drafter == "certain" else mix(proposed(case), proposed(other))
    found = verify(*mixed, rule=rule, draft_logits=draft_logits)
    jax.tree.map(lambda one, all_: np.testing.assert_array_equal(one[mine], all_[order][mine]), found, together)


@pytest.mark.parametrize("rule", RULES)
def test_greedy_rows_accept_the_likeliest_tokens_and_no_others(rule):
    case = make_case(ROWS, WIDTH, VOCAB, kinds=[{"temperature": 0}])
    found = verify(*case.arguments, rule=rule)
    likeliest = case.logits.argmax(-1)
    for row in range(ROWS):
        accepted = int(found.num_accepted[row])
        np.testing.assert_array_equal(found.tokens[row, : accepted + 1], likeliest[row, : accepted + 1])
        if accepted < case.num_drafts[row]:
            assert case.draft_tokens[row, accepted] != likeliest[row, accepted]


def test_logprobs_are_those_of_the_tokens():
    case = make_case(ROWS, WIDTH, VOCAB)
    wanted = np.resize(np.array([-1, 0, 3, 5], np.int32), ROWS)
    rows = case.rows._replace(wants_logprobs=wanted)
    raw = case.logits + np.random.default_rng(9).normal(size=case.logits.shape).astype(np.float32)
    found = verify(*case._replace(rows=rows).arguments, raw_logits=raw, max_logprobs=5)
    exact = scipy.special.log_softmax(raw.astype(np.float64), axis=-1)
    for row, step in itertools.product(range(ROWS), range(WIDTH)):
        token, count = int(found.tokens[row, step]), int(wanted[row])
        leaves = jax.tree.map(lambda leaf, at=(row, step): np.asarray(leaf)[at], found.logprobs)
        if token < 0 or count < 0:
            assert all(not np.any(leaf) for leaf in leaves)
            continue
        np.testing.assert_allclose(leaves.token_logprob, exact[row, step, token], atol=2e-5)
        alone = compute(raw[row : row + 1, step], np.array([token], np.int32), 5, wanted[row : row + 1])
        assert leaves.token_logprob == alone.token_logprob[0]
        assert leaves.rank == alone.rank[0]
        np.testing.assert_array_equal(leaves.top_ids[:count], alone.top_ids[0, :count])
        np.testing.assert_array_equal(leaves.top_logprobs[:count], alone.top_logprobs[0, :count])


def test_the_users_settings_change_nothing():
    case = make_case(ROWS, WIDTH, VOCAB)
    expected = verify(*case.arguments, rule="rejection")
    with jax.enable_x64(True), jax.default_prng_impl("rbg"):
        found = verify(*case.arguments, rule="rejection")
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"int32"}


# The joint distribution of three tokens over a vocabulary of four, where the next token depends on the last.
TOKENS, LENGTH, DRAFTS, TRIALS = 4, 3, 2, 4096
TARGET = np.array(
    [[1.0, 0.2, -0.5, -1.5], [0.3, 0.0, 0.5, -3.0], [-1.0, 2.0, 0.0, 0.5], [0.1, 0.2, 0.0, 0.3]], np.float32
)
PROPOSER = np.array(
    [[0.0, 1.2, -1.0, 0.5], [0.3, 0.1, 0.4, -3.0], [2.0, -1.0, 0.0, 0.5], [0.1, 0.2, 0.0, 0.3]], np.float32
)
FILTERS = [
    {},
    {"temperature": 0.6},
    {"top_k": 2},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.9},
]


@functools.partial(jax.jit, static_argnames=("rule", "drafter"))
def one_round(last, positions, rows, *, rule, drafter):
    """The tokens that follow `last` after one verification of DRAFTS drafts, and how many were accepted."""
    target, proposer = jnp.asarray(TARGET), jnp.asarray(PROPOSER)
    drafts, before = [], [last]
    for step in range(DRAFTS):
        logits = proposer[before[-1]]
        certain = jnp.argmax(logits, axis=1).astype(jnp.int32)
        drafts.append(sample(logits, rows, positions + step) if drafter == "sampled" else certain)
        before.append(drafts[-1])
    logits = jnp.stack([target[token] for token in before], axis=1)
    draft_logits = jnp.stack([proposer[token] for token in before[:-1]], axis=1) if drafter == "sampled" else None
    counts = jnp.full(len(last), DRAFTS, jnp.int32)
    drafts = jnp.stack(drafts, axis=1)
    found = verify_draft(logits, drafts, counts, rows, positions, rule=rule, draft_logits=draft_logits)
    return found.tokens, found.num_accepted


def requests(given: dict) -> SamplingRows:
    """TRIALS requests that differ in their seeds."""
    rows = rows_of([SamplingParams(**given)])
    rows = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf), TRIALS, axis=0), rows)
    return rows._replace(seed=np.stack([np.arange(TRIALS), np.zeros(TRIALS)], axis=1).astype(np.uint32))


def generate(given: dict, rule: str, drafter: str) -> tuple[np.ndarray, np.ndarray]:
    """LENGTH tokens of each request, and how many drafts its first round accepted."""
    rows, every = requests(given), np.arange(TRIALS)
    last, length = np.zeros(TRIALS, np.int32), np.zeros(TRIALS, np.int32)
    tokens = np.full((TRIALS, LENGTH + DRAFTS + 1), -1, np.int32)
    first = None
    while (length < LENGTH).any():
        found, accepted = (np.asarray(x) for x in one_round(last, length, rows, rule=rule, drafter=drafter))
        first = accepted if first is None else first
        running = length < LENGTH
        for step in range(DRAFTS + 1):
            new = running & (step <= accepted)
            tokens[every[new], length[new] + step] = found[new, step]
        last = np.where(running, found[every, accepted], last)
        length = np.where(running, length + accepted + 1, length).astype(np.int32)
    return tokens[:, :LENGTH], first


@pytest.mark.parametrize(("rule", "drafter"), WAYS)
@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_joint_distribution(given, rule, drafter):
    params = SamplingParams(**given)
    tokens, accepted = generate(given, rule, drafter)
    p = np.stack([exact_distribution(row, params) for row in TARGET])
    q = np.stack([exact_distribution(row, params) for row in PROPOSER])
    joint = p[0][:, None, None] * p[:, :, None] * p[None]
    counts = np.zeros((TOKENS,) * LENGTH)
    np.add.at(counts, tuple(tokens.T), 1)
    assert counts[joint == 0].sum() == 0
    expected = joint[joint > 0] * TRIALS
    observed = counts[joint > 0]
    rare = expected < 10
    expected, observed = (np.append(x[~rare], x[rare].sum()) if rare.any() else x for x in (expected, observed))
    family = 2 * len(FILTERS) * len(WAYS)
    assert scipy.stats.chisquare(observed, expected).pvalue > FAMILY_ALPHA / family
    if rule == "rejection":  # and it accepts as often as it may
        offered = np.eye(TOKENS)[PROPOSER[0].argmax()] if drafter == "certain" else q[0]
        rate = np.minimum(p[0], offered).sum()
        accepts = int((accepted > 0).sum())
        assert scipy.stats.binomtest(accepts, TRIALS, min(rate, 1.0)).pvalue > FAMILY_ALPHA / family


@pytest.mark.parametrize("given", KINDS[:3], ids=str)
def test_agreement_gives_the_tokens_of_one_by_one(given):
    rows = requests(given)
    tokens, _ = generate(given, "agreement", "sampled")
    last = np.zeros(TRIALS, np.int32)
    for position in range(LENGTH):
        last = np.asarray(by_candidates(TARGET[last], rows, np.full(TRIALS, position, np.int32)))
        np.testing.assert_array_equal(tokens[:, position], last)


def test_an_unknown_rule_is_an_error():
    with pytest.raises(ValueError, match="rule"):
        verify(*make_case(ROWS, WIDTH, VOCAB).arguments, rule="always")
