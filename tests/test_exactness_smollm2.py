"""The promises of test_exactness.py on the real model, in bfloat16. Each compiled body takes seconds: the variations
that add shapes are slow tests."""

import random

import numpy as np
import pytest
from draft_head_tools import tiny_head, tiny_medusa
from engine_tools import Requests, assert_same, run, run_alone, with_budget

from jaxserve import Engine, SamplingParams
from jaxserve.checkpoint.hugging_face import dtype_of, read_config
from jaxserve.checkpoint.loading import load_decoder, model_folder
from jaxserve.scheduler.scheduler import Scheduler

STORY = (
    "The lighthouse keeper wrote every evening in a thick brown book. She noted the wind, the height of the waves, "
    "the ships that passed and the birds that rested on the railing. "
)
TARGETS: Requests = [
    ("The capital of France is", SamplingParams(temperature=0, max_tokens=12, logprobs=3)),
    (STORY * 7, SamplingParams(temperature=0.9, seed=1, max_tokens=12, logprobs=3)),
    (STORY + "In 1887,", SamplingParams(temperature=1.0, top_p=0.9, seed=-2, max_tokens=12, logprobs=3, n=2)),
    (STORY * 8, SamplingParams(temperature=0, max_tokens=12, logprobs=3)),
]


def smollm2(budget: int = 512, **options) -> Engine:
    """Steps have at most `budget` tokens; the programs are those for 512, so that the tests share them."""
    defaults = {"max_model_len": 1024, "num_pages": 512, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    return with_budget(Engine(**{**defaults, "deterministic": True, "enable_prefix_caching": False, **options}), budget)


def company(count: int) -> Requests:
    source = random.Random(3)
    return [
        (
            [source.randrange(49152) for _ in range(source.randint(1, 60))],
            SamplingParams(temperature=source.choice([0, 0.8]), seed=index, max_tokens=source.randint(1, 14)),
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def alone():
    with smollm2() as engine:
        return run_alone(engine, TARGETS)


def test_among_others(alone):
    others = company(28)
    mixed = [*others[:9], TARGETS[0], *others[9:14], TARGETS[1], *others[14:20], *TARGETS[2:], *others[20:]]
    with smollm2(64) as engine:
        results = run(engine, mixed)
    assert_same([results[mixed.index(target)] for target in TARGETS], alone)


def test_cold_and_from_the_prefix_cache(alone):
    with smollm2(64, enable_prefix_caching=True) as engine:
        assert_same(run(engine, TARGETS), alone)
        assert_same(run(engine, TARGETS), alone)
        assert engine.stats()["prefix_cache_hits"] > 400


@pytest.mark.slow
@pytest.mark.parametrize("budget", [16, 256])
def test_in_chunks(alone, budget):
    with smollm2(budget) as engine:
        assert_same(run(engine, TARGETS), alone)


@pytest.mark.slow
def test_in_chunks_of_random_sizes(alone, monkeypatch):
    source = random.Random(1)
    monkeypatch.setattr(Scheduler, "chunk_limit", lambda self, request: source.randint(1, request.num_to_compute))
    with smollm2(64) as engine:
        assert_same(run(engine, TARGETS), alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"page_size": 64, "num_pages": 128}, {"async_scheduling": False}], ids=["page size 64", "no overlap"]
)
def test_with_other_options(alone, options):
    with smollm2(64, **options) as engine:
        assert_same(run(engine, TARGETS), alone)


@pytest.mark.slow
def test_with_preemptions(alone):
    with smollm2(64, num_pages=64) as engine:
        others = [(prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)) for prompt, _ in company(24)]
        results = run(engine, [*others, *TARGETS])
        assert engine.stats()["num_preemptions"] >= 3
    assert_same(results[-len(TARGETS) :], alone)


@pytest.mark.slow
def test_decoded_and_recomputed(alone):
    beginnings = [
        (engine_ids + result.outputs[0].token_ids[:5], SamplingParams(**{**_fields(params), "max_tokens": 7, "n": 1}))
        for (_, params), result in zip(TARGETS, alone, strict=True)
        for engine_ids in [result.prompt_token_ids]
    ]
    with smollm2(64) as engine:
        for result, whole in zip(run(engine, beginnings), alone, strict=True):
            assert result.outputs[0].token_ids == whole.outputs[0].token_ids[5:]
            assert result.outputs[0].logprobs == whole.outputs[0].logprobs[5:]


def _fields(params: SamplingParams) -> dict:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def test_with_the_head_that_comes_with_it(alone):
    """It need not be named; first drafts of a greedy answer are right two times in five, as when it was trained."""
    drafts = {"method": "eagle", "num_speculative_tokens": 3, "length_control": "fixed", "prompt_lookup": False}
    greedy = SamplingParams(temperature=0, max_tokens=48)
    with smollm2(64, speculative_config=drafts) as engine:
        assert_same(run(engine, TARGETS), alone)
        engine.reset_stats()
        run(engine, [("<|im_start|>user\nWhat is a lighthouse?<|im_end|>\n<|im_start|>assistant\n", greedy)])
        stats = engine.stats()
    assert stats["spec_num_accepted_tokens_pos_0"] > 0.25 * stats["spec_num_drafts"]


SOME_TOKENS = np.arange(0, 49152, 12)
# What guesses at random is right only where the text itself is looked through first; the model itself nearly always.
DRAFTS = {
    "ngram": lambda target: None,
    "draft_model": lambda target: target,
    "eagle": lambda target: None,  # the head that comes with the model
    "eagle3": lambda target: tiny_head(target, SOME_TOKENS, third=True),
    "medusa": lambda target: tiny_medusa(target, SOME_TOKENS, 7),
}


@pytest.fixture(scope="module")
def target():
    folder = model_folder(None)
    config = read_config(folder, max_model_len=1024)
    return load_decoder(folder, dtype=dtype_of(config, "auto"), max_model_len=1024)


@pytest.fixture(scope="module")
def others():
    """Greedy and seeded requests that grow to more pages than there are, and what they get without drafts. A third
    declines drafts."""
    requests = []
    for index, (prompt, _) in enumerate(company(24)):
        how = {"temperature": index % 2 * 0.8, "seed": index, "logprobs": 2, "speculative": index % 3 > 0}
        requests.append((prompt, SamplingParams(**how, max_tokens=80, ignore_eos=True)))
    with smollm2(64) as engine:
        return requests, run(engine, requests)


@pytest.mark.slow
@pytest.mark.parametrize("method", DRAFTS)
def test_whatever_proposes(alone, others, target, method):
    """As users have it, lengths chosen step by step, in mixed company, with chunks and preemptions."""
    requests, expected = others
    drafts = {"speculative_config": {"method": method}, "draft_decoder": DRAFTS[method](target)}
    with smollm2(64, num_pages=64, **drafts) as engine:
        assert_same(run(engine, [*requests, *TARGETS]), [*expected, *alone])
        stats = engine.stats()
    assert stats["num_preemptions"] > 0
    assert 0 < stats["spec_num_accepted_tokens"] <= stats["spec_num_draft_tokens"]
