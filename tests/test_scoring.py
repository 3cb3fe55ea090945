"""`LLM.score`: pairs, tokens and results; values against transformers stand in test_goldens.py."""

import math

import pytest
from checkpoint_tools import byte_tokenizer
from engine_tools import tiny_engine

from jaxserve import LLM, SamplingParams

VOCAB = 300


@pytest.fixture(scope="module")
def llm():
    engine = tiny_engine("float32", text=byte_tokenizer(VOCAB))
    with LLM(engine=engine) as llm:
        yield llm


def greedy_answer(llm, prompt, count=6):
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
    return llm.generate(prompt, params)[0].outputs[0]


def test_a_greedy_answer_scores_as_it_was_generated(llm):
    prompt = [5, 6, 7, 8]
    answer = greedy_answer(llm, prompt)
    [score] = llm.score(prompt, answer.token_ids)
    assert score.is_greedy
    assert score.token_ids == answer.token_ids
    generated = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert score.token_logprobs == generated  # the same bits
    assert score.logprob == sum(generated)
    other = [*answer.token_ids[:-1], (answer.token_ids[-1] + 1) % VOCAB]
    [worse] = llm.score(prompt, other)
    assert not worse.is_greedy
    assert worse.token_logprobs[:-1] == generated[:-1]
    assert worse.logprob < score.logprob


def test_one_prompt_for_many_continuations_is_computed_once(llm):
    context = "x" * 200
    ends = ["yes", "no", "maybe so"]
    first = llm.score(context, ends)
    again = llm.score([context] * 3, ends)
    assert [(s.logprob, s.token_logprobs) for s in first] == [(s.logprob, s.token_logprobs) for s in again]
    assert all(score.num_cached_tokens >= 192 for score in again)
    alone = [llm.score(context, end)[0] for end in ends]
    assert [s.logprob for s in alone] == [s.logprob for s in first]


def test_white_space_before_a_continuation_counts_to_it(llm):
    apart, together = llm.score(["a b ", "a b"], ["c", " c"])
    assert (apart.token_ids, apart.logprob) == (together.token_ids, together.logprob)
    assert len(together.token_ids) == 2


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        ("a", [], "continuations: 0 given for 1 prompts"),
        (["a", "b"], ["c", "d", "e"], "continuations: 3 given for 2 prompts"),
        ("", "c", "prompts: it holds no tokens"),
        ("  ", "c", "prompts: it holds no tokens"),
        ("a", "", "continuations: it adds no tokens"),
        ([1, 2], "c", "must both be texts or both be token ids"),
        (5, "c", "prompts=5: prompts must be"),
        ([1], [300], r"prompt_token_ids: \[300\]"),
        ("a\ud800", "c", "must be valid Unicode"),
        ("a" * 510, "bcd", "prompt: 513 tokens: must be at most max_model_len=512"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_anything_runs(llm, prompts, continuations, message):
    before = llm.stats()["steps"]
    with pytest.raises(ValueError, match=message):
        llm.score(prompts, continuations)
    assert llm.stats()["steps"] == before
    assert math.isfinite(llm.score([1], [2])[0].logprob)
