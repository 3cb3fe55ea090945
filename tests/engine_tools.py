"""What the engine's tests share: tiny models, runs that return everything a user sees, and their comparison."""

import random
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
from hypothesis import strategies as st

from jaxserve import Engine, SamplingParams
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.weights import random_decoder
from jaxserve.outputs import RequestOutput

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 7,
}


@cache
def tiny_decoder(dtype: str = "bfloat16", **changes) -> Decoder:
    config = ModelConfig.from_hf({**TINY, **changes})
    return random_decoder(config, seed=1, dtype=jnp.dtype(dtype))


def tiny_engine(dtype: str = "bfloat16", *, budget: int | None = None, **options) -> Engine:
    """An engine over a tiny random model, without a tokenizer; `budget` as in `with_budget`."""
    defaults = {"num_pages": 512, "max_num_seqs": 32, "max_num_batched_tokens": 256, "deterministic": True}
    # One shape for all: tests share compiled programs through the persistent cache.
    return with_budget(Engine(**{"decoder": tiny_decoder(dtype), **defaults, **options}), budget)


def with_budget(engine: Engine, tokens: int | None) -> Engine:
    """The engine with steps of so many tokens at most, by programs that would take more: tests share them."""
    if tokens is not None:
        engine.scheduler.max_num_batched_tokens = tokens
    return engine


Requests = list[tuple[list[int] | str, SamplingParams]]


def requests_for(vocab: int, count: int, seed: int = 0, longest: int = 150, max_tokens: int = 20) -> Requests:
    """Greedy and seeded requests of many lengths; every fourth has three branches, some share a prefix, some have
    penalties, masks and prompt log-probabilities."""
    source = random.Random(seed)
    shared = [source.randrange(vocab) for _ in range(longest)]
    requests = []
    for index in range(count):
        length = source.choice([1, 2, 15, 16, 17, 33, 64, source.randint(1, longest), longest])
        prompt = [source.randrange(vocab) for _ in range(length)]
        if index % 3 == 0:
            cut = source.randint(0, length)
            prompt[:cut] = shared[:cut]
        params = SamplingParams(
            temperature=0.0 if index % 2 else 0.9,
            top_p=0.95 if index % 5 == 0 else 1.0,
            top_k=20 if index % 7 == 0 else 0,
            seed=index,
            max_tokens=source.randint(1, max_tokens),
            logprobs=-1 if index == 9 else 2,
            n=3 if index % 4 == 2 else 1,
            repetition_penalty=1.3 if index % 6 == 1 else 1.0,
            frequency_penalty=0.5 if index % 8 == 2 else 0.0,
            presence_penalty=-0.5 if index % 10 == 3 else 0.0,
            logit_bias={index: 5.0, 7: -100.0} if index % 7 == 5 else None,
            allowed_token_ids=list(range(3, vocab, 2)) if index % 11 == 6 else None,
            prompt_logprobs=2 if index % 9 == 4 else None,
        )
        requests.append((prompt, params))
    return requests


@st.composite
def repetitive_requests(draw):
    """Prompts that repeat themselves, with any parameters, so that drafts are accepted and rejected."""
    piece = draw(st.lists(st.integers(8, 20), min_size=1, max_size=5))
    prompt = (piece * draw(st.integers(1, 8)))[: draw(st.integers(1, 30))]
    params = {
        "max_tokens": draw(st.integers(1, 40)),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.7, 1.0])),
        "seed": draw(st.integers(0, 9)),
        "n": draw(st.sampled_from([1, 1, 2])),
        "logprobs": draw(st.sampled_from([None, 0, 3, -1])),
        "repetition_penalty": draw(st.sampled_from([1.0, 0.5, 1.3])),
        "frequency_penalty": draw(st.sampled_from([0.0, -1.0, 0.5])),
        "presence_penalty": draw(st.sampled_from([0.0, -1.0])),
        "top_k": draw(st.sampled_from([0, 3])),
        "top_p": draw(st.sampled_from([1.0, 0.8])),
        "min_p": draw(st.sampled_from([0.0, 0.2])),
    }
    if draw(st.booleans()):
        params["logit_bias"] = dict.fromkeys(draw(st.sets(st.integers(8, 20), min_size=1, max_size=4)), 30.0)
    if draw(st.booleans()):
        params["allowed_token_ids"] = tuple(sorted(draw(st.sets(st.integers(5, 20), min_size=2, max_size=6))))
        params.pop("logit_bias", None)
    if draw(st.booleans()):
        params["stop_token_ids"] = (draw(st.integers(8, 20)),)
        if "allowed_token_ids" not in params:
            params["min_tokens"] = draw(st.integers(0, params["max_tokens"]))
    return prompt, SamplingParams(**params)


def run(engine: Engine, requests: Requests) -> list[RequestOutput]:
    """All requests together, results in order; checks the engine's integrity when it is idle."""
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(f"{index}", prompt, params)
    results: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        collect(engine.step(), results)
    engine.check_integrity()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    return [results[f"{index}"] for index in range(len(requests))]


def collect(deltas: list[RequestOutput], results: dict[str, RequestOutput]) -> None:
    """Add what a step added to the results by request id."""
    for delta in deltas:
        if delta.request_id in results:
            results[delta.request_id].extend(delta)
        else:
            results[delta.request_id] = delta


def run_alone(engine: Engine, requests: Requests) -> list[RequestOutput]:
    """One request after the other."""
    return [run(engine, [request])[0] for request in requests]


def assert_same(results: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Token ids, log-probabilities (every bit), ranks and finish reasons are equal."""
    assert len(results) == len(expected)
    for index, (result, want) in enumerate(zip(results, expected, strict=True)):
        assert result.prompt_logprobs == want.prompt_logprobs, f"request {index}"
        for branch, other in zip(result.outputs, want.outputs, strict=True):
            where = f"request {index}, branch {branch.index}"
            assert branch.token_ids == other.token_ids, where
            assert branch.logprobs == other.logprobs, where
            assert branch.finish_reason == other.finish_reason, where


def one_branch(requests: Requests) -> Requests:
    """Every branch of every request as a request of its own, with the branch's seed."""
    from jaxserve.sampling_params import child_seed

    return [
        (prompt, replace(params, n=1, seed=child_seed(params.seed, index)))
        for prompt, params in requests
        for index in range(params.n)
    ]
