"""Verification of drafts: agreement gives the sampler's own tokens, rejection the target's distribution."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import strategies as st

from jaxserve.config import ACCEPTANCE_RULES
from jaxserve.kernels_pallas.verify_draft import REFERENCE, DraftLogits, DraftRows, reached
from jaxserve.kernels_pallas.verify_draft.reference import verify_draft
from jaxserve.kernels_pallas.verify_draft.sampler import SamplingRows, sample
from jaxserve.sampling_params import SamplingParams
from tests.kernels.verify_tools import KINDS, make_case, sampled_drafts
from tests.sampling.helpers import by_candidates, exact_distribution, rows_of

# The whole family of chi-square tests fails by chance with this probability (Bonferroni); seeds are fixed.
FAMILY_ALPHA = 1e-3
RUNS, WIDTH, VOCAB = 16, 4, 300  # of most tests: each shape is a compilation
WAYS = [("agreement", "sampled"), ("rejection", "certain"), ("rejection", "sampled")]
verify = jax.jit(verify_draft, static_argnames=("rule", "candidates"))


def test_agreement_gives_the_samplers_tokens():
    case = make_case(RUNS, WIDTH, VOCAB)
    np.testing.assert_array_equal(verify(*case.arguments), case.samples)
    lengths = [len(tokens) for tokens in case.yielded(case.samples)]
    assert 1 == min(lengths) < max(lengths), "nothing was verified"


def test_one_call_says_what_is_accepted_what_follows_and_how_likely_it_is():
    case = make_case(RUNS, WIDTH, VOCAB)
    raw = np.random.default_rng(4).normal(size=case.logits.shape).astype(np.float32)
    wanted = case.rows._replace(wants_logprobs=np.full(len(raw), 3, np.int32))
    alive = np.ones(len(raw), bool)
    judge = jax.jit(functools.partial(REFERENCE.judge, max_logprobs=5))
    tokens, counts, found = judge(case.logits, wanted, case.positions, case.drafts, alive, raw=raw)
    expected = case.yielded(case.samples)
    mine = [np.asarray(tokens)[run][np.asarray(counts)[run]].tolist() for run in np.split(np.arange(len(raw)), RUNS)]
    assert mine == expected
    exact = scipy.special.log_softmax(raw.astype(np.float64), axis=1)
    np.testing.assert_allclose(found.token_logprob, exact[np.arange(len(raw)), tokens], atol=1e-4)
    np.testing.assert_array_equal(found.top_ids, np.argsort(-raw, axis=1, kind="stable")[:, :5])
    tokens, counts, _ = judge(case.logits, wanted, case.positions, None, alive, raw=raw)
    np.testing.assert_array_equal(tokens, case.samples)
    assert np.asarray(counts).all()


@pytest.mark.parametrize("rule", ACCEPTANCE_RULES)
def test_without_drafts_it_is_the_sampler(rule):
    case = make_case(RUNS, WIDTH, VOCAB)
    first = case.drafts.number == 0
    idle = case._replace(drafts=case.drafts._replace(real=first))
    np.testing.assert_array_equal(verify(*idle.arguments, rule=rule)[first], case.samples[first])
    alone = case._replace(drafts=DraftRows(np.zeros_like(case.drafts.number), case.drafts.token, np.ones_like(first)))
    np.testing.assert_array_equal(verify(*alone.arguments, rule=rule), case.samples)


@pytest.mark.parametrize(("rule", "drafter"), WAYS)
def test_a_runs_tokens_do_not_depend_on_the_others(rule, drafter):
    case, other = make_case(RUNS, WIDTH, VOCAB), make_case(RUNS, WIDTH, VOCAB, spread=0.3, seed=9)
    proposed = sampled_drafts(case) if drafter == "sampled" else None
    together = case.yielded(verify(*case.arguments, rule=rule, draft_logits=proposed))
    order = np.random.default_rng(1).permutation(RUNS)
    mine = np.arange(RUNS) % 3 == 0  # elsewhere, among runs that are not the same
    places = (order[:, None] * WIDTH + np.arange(WIDTH)).reshape(-1)
    kept = np.repeat(mine, WIDTH)
    mix = lambda leaf, alien: np.where(kept.reshape(-1, *[1] * (leaf.ndim - 1)), np.asarray(leaf)[places], alien)
    mixed = jax.tree.map(mix, case, other)
    if proposed is not None:
        proposed = proposed._replace(row=proposed.row[places])
    found = mixed.yielded(verify(*mixed.arguments, rule=rule, draft_logits=proposed))
    assert [tokens for run, tokens in enumerate(found) if mine[run]] == [
        together[run] for run, own in zip(order, mine, strict=True) if own
    ]


@pytest.mark.parametrize("candidates", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_the_ways_to_judge_agree(candidates):
    """All rows at once, without looking at the best tokens first, or at so few that they rarely suffice."""
    case = make_case(RUNS, WIDTH, VOCAB)
    given = {"rule": "rejection", "draft_logits": sampled_drafts(case)}
    expected = case.yielded(verify(*case.arguments, **given))
    assert case.yielded(verify(*case.arguments, **given, candidates=candidates)) == expected


@pytest.mark.parametrize("rule", ACCEPTANCE_RULES)
def test_greedy_rows_yield_the_likeliest_tokens(rule):
    case = make_case(RUNS, WIDTH, VOCAB, kinds=[{"temperature": 0}])
    np.testing.assert_array_equal(verify(*case.arguments, rule=rule), case.logits.argmax(-1))


def test_the_users_settings_change_nothing():
    case = make_case(RUNS, WIDTH, VOCAB)
    expected = verify(*case.arguments, rule="rejection", draft_logits=sampled_drafts(case))
    with jax.enable_x64(True), jax.default_prng_impl("rbg"):
        found = verify(*case.arguments, rule="rejection", draft_logits=sampled_drafts(case))
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.int32


run = st.tuples(
    st.lists(st.integers(0, 1), min_size=0, max_size=7),  # draft tokens
    st.integers(0, 7),  # how many of them exist
    st.lists(st.integers(0, 1), min_size=8, max_size=8),  # what the rows yield
    st.lists(st.booleans(), min_size=8, max_size=8),  # whether they can yield anything
)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.lists(run, min_size=1, max_size=6), st.booleans())
def test_the_rows_that_count_are_those_behind_right_drafts(runs, all_alive):
    size = 24
    number, draft, real, yielded, alive, expected = ([] for _ in range(6))
    for drafts, exist, targets, can in runs:
        exist = min(exist, len(drafts))
        if len(number) + len(drafts) + 1 > size:
            break
        going_on = True
        for row in range(len(drafts) + 1):
            lives = all_alive or can[row]
            if row > 0:
                going_on = going_on and row <= exist and lives and drafts[row - 1] == targets[row - 1]
            number.append(row)
            draft.append(drafts[row - 1] if row else 9)
            real.append(row <= exist)
            yielded.append(targets[row])
            alive.append(lives)
            expected.append(going_on)
    fill = lambda values, value, dtype: np.array([*values, *[value] * (size - len(values))], dtype)
    rows = DraftRows(*map(jnp.asarray, (fill(number, 0, np.int32), fill(draft, 0, np.int32), fill(real, False, bool))))
    counts = reached(rows, jnp.asarray(fill(yielded, 0, np.int32)), jnp.asarray(fill(alive, True, bool)))
    assert counts[: len(number)].tolist() == expected
    assert not counts[len(number) :].any(), "padding counts"


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
    width, count = DRAFTS + 1, len(last)
    flat = lambda columns: jnp.stack(columns, axis=1).reshape(width * count, *columns[0].shape[1:])
    number = jnp.tile(jnp.arange(width, dtype=jnp.int32), count)
    runs = DraftRows(number, flat(before), jnp.ones(width * count, bool))
    offered = None
    if drafter == "sampled":
        at = jnp.arange(width * count, dtype=jnp.int32)
        offered = DraftLogits(flat([proposer[token] for token in [last, *before[:-1]]]), at)
    every = jax.tree.map(lambda leaf: jnp.repeat(leaf, width, axis=0), rows)
    at = flat([positions + step for step in range(width)])
    extras = {"rule": rule, "draft_logits": offered, "candidates": 0}  # all rows at once: there are many
    tokens = verify_draft(target[flat(before)], every, at, runs, **extras)
    counts = reached(runs, tokens, jnp.ones_like(runs.real)).reshape(count, width)
    return tokens.reshape(count, width), counts.sum(axis=1) - 1


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
        last = np.where(running, found[every, accepted], last).astype(np.int32)
        length = np.where(running, length + accepted + 1, length).astype(np.int32)
    return tokens[:, :LENGTH], first


@pytest.mark.parametrize(("rule", "drafter"), WAYS)
@pytest.mark.parametrize(
    "given",
    [pytest.param(given, marks=pytest.mark.slow if i in (1, 2, 4) else ()) for i, given in enumerate(FILTERS)],
    ids=str,
)
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
        verify(*make_case(RUNS, WIDTH, VOCAB).arguments, rule="always")
