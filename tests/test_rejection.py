"""`acceptance="rejection"` on whole engines: the target's distribution, whoever drafts and whatever a request asks for.

For the distribution the vocabulary is tiny, so every sequence of tokens has its exact probability: from the
log-probabilities that an engine without drafts gives after each prefix, filtered and penalised by the definition.
"""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from draft_head_tools import tiny_head, tiny_medusa
from engine_tools import assert_same, requests_for, run, run_alone, tiny_decoder, tiny_engine

from jaxserve import SamplingParams, startup
from jaxserve.cache.kv_cache import KVLayout
from jaxserve.config import ACCEPTANCE_RULES
from jaxserve.kernels_pallas.paged_attention import XLA
from jaxserve.runner.runner import Runner
from jaxserve.scheduler.buckets import Buckets
from tests.sampling.helpers import exact_distribution

# The whole family of chi-square tests fails by chance with this probability (Bonferroni); seeds are fixed.
FAMILY_ALPHA = 1e-3
VOCAB, LENGTH, TRIALS = 4, 3, 1500
PROMPT = [1, 2, 3, 0, 2, 1, 2]
KINDS = [
    {"temperature": 2.0},
    {"temperature": 2.5, "top_k": 3, "top_p": 0.9},
    {"frequency_penalty": 0.9, "presence_penalty": -0.4, "temperature": 1.5},
    {"allowed_token_ids": [0, 2, 3], "temperature": 3.0},
]
# In float32 XLA's products keep their bits from 64 rows on: one bucket, so few programs.
SIZES = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "linear_backend": "xla", "max_model_len": 128}
METHODS = {
    "draft_model": {"method": "draft_model"},
    "unsure": {"method": "draft_model", "draft_confidence_threshold": 0.65},  # ends some
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    "eagle": {"method": "eagle"},  # a head that knows three of the four tokens
    "medusa": {"method": "medusa"},  # likewise
}


def decoder(**changes):
    return tiny_decoder("float32", vocab_size=VOCAB, eos_token_id=None, **changes)


@pytest.fixture(scope="module")
def logprobs() -> dict[tuple[int, ...], np.ndarray]:
    """Of the whole vocabulary after the prompt and each continuation."""
    prefixes = [prefix for length in range(LENGTH) for prefix in itertools.product(range(VOCAB), repeat=length)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    with tiny_engine(decoder=decoder(), **SIZES) as engine:
        results = run(engine, [([*PROMPT, *prefix], params) for prefix in prefixes])
    rows = [result.outputs[0].logprobs[0] for result in results]
    return {
        prefix: np.array([row[token].logprob for token in range(VOCAB)])
        for prefix, row in zip(prefixes, rows, strict=True)
    }


def next_token(logprobs: np.ndarray, prefix: tuple[int, ...], params: SamplingParams) -> np.ndarray:
    """The distribution that the next token must have."""
    counts = np.bincount(np.array(prefix, int), minlength=VOCAB)
    changed = logprobs - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.allowed_token_ids is not None:
        changed = np.where(np.isin(np.arange(VOCAB), params.allowed_token_ids), changed, -np.inf)
    return exact_distribution(changed, params)


def joint_distribution(logprobs, params: SamplingParams) -> np.ndarray:
    joint = np.ones((VOCAB,) * LENGTH)
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        for place in range(LENGTH):
            prefix = tokens[:place]
            joint[tokens] *= next_token(logprobs[prefix], prefix, params)[tokens[place]]
    return joint


@pytest.fixture(
    scope="module",
    params=["draft_model", *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "draft_model")],
)
def engine(request):
    config = {**METHODS[request.param], "num_speculative_tokens": LENGTH, "length_control": "fixed"}
    drafts = {
        "draft_model": lambda: decoder(num_hidden_layers=1, rope_theta=100.0),
        "unsure": lambda: decoder(num_hidden_layers=1, rope_theta=100.0),
        "eagle": lambda: tiny_head(decoder(), np.array([0, 1, 3])),
        "medusa": lambda: tiny_medusa(decoder(), np.array([0, 1, 3]), LENGTH),
    }
    draft = drafts.get(request.param, lambda: None)()
    config["acceptance"] = "rejection"
    with tiny_engine(decoder=decoder(), draft_decoder=draft, speculative_config=config, **SIZES) as engine:
        yield engine


@pytest.mark.parametrize(
    "given",
    [pytest.param(given, marks=pytest.mark.slow if i % 3 == 0 else ()) for i, given in enumerate(KINDS)],
    ids=str,
)
def test_joint_distribution_of_three_tokens(engine, logprobs, given):
    asked = [SamplingParams(seed=seed, max_tokens=LENGTH + 1, ignore_eos=True, **given) for seed in range(TRIALS)]
    engine.reset_stats()
    results = run(engine, [(PROMPT, params) for params in asked])
    stats = engine.stats()
    assert 0 < stats["spec_num_accepted_tokens"] < stats["spec_num_draft_tokens"]
    joint = joint_distribution(logprobs, asked[0])
    counts = np.zeros_like(joint)
    np.add.at(counts, tuple(np.array([result.outputs[0].token_ids[:LENGTH] for result in results]).T), 1)
    assert counts[joint == 0].sum() == 0
    expected, observed = joint[joint > 0] * TRIALS, counts[joint > 0]
    rare = expected < 10  # pooled, as the chi-square approximation asks
    expected, observed = (np.append(x[~rare], x[rare].sum()) if rare.any() else x for x in (expected, observed))
    pvalue = scipy.stats.chisquare(observed, expected).pvalue
    assert pvalue > FAMILY_ALPHA / (len(KINDS) * len(METHODS))


# ---- what does not change -------------------------------------------------------------------------------

# Two engines more, whose heads take long to compile.
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def plain():
    with tiny_engine("float32", **SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def rejecting():
    config = {"method": "draft_model", "num_speculative_tokens": 3, "length_control": "fixed"}
    config["acceptance"] = "rejection"
    draft = tiny_decoder("float32", rope_theta=500.0)
    with tiny_engine("float32", speculative_config=config, draft_decoder=draft, **SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def requests():
    return requests_for(300, 12, longest=60, max_tokens=24)


@pytest.fixture(scope="module")
def sampled(rejecting, requests):
    return run(rejecting, requests)


@slow
def test_greedy_requests_and_those_that_decline_have_the_same_tokens(plain, rejecting, requests):
    same = [
        (prompt, params if params.temperature == 0 else replace(params, speculative=False))
        for prompt, params in requests
    ]
    rejecting.reset_stats()
    assert_same(run(rejecting, same), run(plain, same))
    stats = rejecting.stats()
    assert 0 < stats["spec_num_accepted_tokens"] < stats["spec_num_draft_tokens"]


@slow
def test_log_probabilities_are_those_of_the_tokens(plain, requests, sampled):
    """Of whatever was sampled: as if an engine without drafts had read it."""
    outputs = [
        (prompt, output)
        for (prompt, params), result in zip(requests, sampled, strict=True)
        for output in result.outputs
        if params.temperature > 0
    ]
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scored = run(plain, [([*prompt, *output.token_ids], score) for prompt, output in outputs])
    for (prompt, output), result in zip(outputs, scored, strict=True):
        read = result.prompt_logprobs[len(prompt) :]
        for token, mine, theirs in zip(output.token_ids, output.logprobs, read, strict=True):
            assert mine[token] == theirs[token]


@slow
def test_masks_hold(requests, sampled):
    asked = [
        (params, result) for (_, params), result in zip(requests, sampled, strict=True) if params.allowed_token_ids
    ]
    assert asked
    for params, result in asked:
        assert {token for output in result.outputs for token in output.token_ids} <= set(params.allowed_token_ids)


@slow
def test_with_fixed_lengths_and_room_for_all_company_changes_nothing(rejecting, requests):
    """Eight branches: their drafts fit into half of a step, which is what they get while prompts are read."""
    company = requests[:6]
    assert_same(run_alone(rejecting, company[::2]), run(rejecting, company)[::2])


def test_a_runner_that_remembers_no_draft_logits_is_refused():
    """Without them a draft would count as certain."""
    draft = decoder(num_hidden_layers=1)
    layout = KVLayout(2, 2, 16, 16, jnp.dtype("float32"), draft=KVLayout(1, 2, 16, 16, jnp.dtype("float32")))
    sizes = {"layout": layout, "num_pages": 8, "num_slots": 2, "max_len": 32, "buckets": Buckets.make(8, 8)}
    with pytest.raises(ValueError, match="max_drafts=0"):
        Runner(decoder(), **sizes, attention=XLA, draft=draft, acceptance="rejection")


@slow
def test_the_memory_plan_knows_the_draft_logits(rejecting):
    workspaces = []
    for rule in ACCEPTANCE_RULES:
        speculative = replace(rejecting.config.speculative_config, acceptance=rule)
        config = replace(rejecting.config, speculative_config=speculative)
        decoder = tiny_decoder("float32")
        workspaces.append(startup.prepare(config, decoder, None, decoder).memory_plan.workspace)
    agreement, rejection = workspaces
    assert rejection - agreement == rejecting.runner.slots.draft_logits.nbytes == 4 * 16 * 3 * 300
