"""Everything a request may ask, in the engine: against the dense model and definitions, in mixed batches."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_tools import byte_tokenizer
from engine_tools import assert_same, run, tiny_decoder, tiny_engine

from jaxserve import SamplingParams
from jaxserve.scheduler.scheduler import Scheduler

VOCAB, EOS = 300, 7
PROMPT = list(range(20, 60))
TEXT = byte_tokenizer(VOCAB)
LETTERS = TEXT.encode("abcdefghijklmnopqrstuvwxyz")


@pytest.fixture(scope="module")
def engine():
    with tiny_engine("float32", text=TEXT) as engine:
        yield engine


@jax.jit
def _dense(tokens):
    decoder = tiny_decoder("float32")
    return decoder.logits(decoder(tokens, jnp.arange(tokens.shape[0], dtype=jnp.int32)))


def dense_logits(tokens: list[int]) -> np.ndarray:
    """The logits after each token, from the whole sequence at once (padded behind: attention is causal)."""
    padded = np.zeros(512, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_dense(padded), np.float64)[: len(tokens)]


def dense_logprobs(tokens: list[int]) -> np.ndarray:
    logits = dense_logits(tokens)
    return logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) - logits.max(1)[:, None]


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 16, "ignore_eos": True, **changes})


# ---- what changes the logits ----------------------------------------------------------------------------


def changed(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Masks, biases and penalties by their definition."""
    logits = logits.copy()
    if len(output) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -np.inf
    for token in params.allowed_token_ids if params.bad_words else ():
        if TEXT.decode([*output, token]).endswith(params.bad_words):
            logits[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if params.allowed_token_ids is not None:
        logits[[token for token in range(VOCAB) if token not in params.allowed_token_ids]] = -np.inf
    for token in {*prompt, *output}:
        logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return logits


ASKED = {
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.0},
    "encouraged": {"frequency_penalty": -1.0, "presence_penalty": -0.5, "repetition_penalty": 3.0},
    "bias": {"logit_bias": {11: 4.0, 12: 3.5, 250: -100}},
    "allowed": {"allowed_token_ids": [5, 9, 200, 201, 202]},
    "bad words": {"allowed_token_ids": LETTERS[:3], "bad_words": ["aa", "bb", "cc", "aba", "bcb", "cac"]},
    "min tokens": {"stop_token_ids": list(range(0, VOCAB, 5)), "min_tokens": 16},
    "all": {
        "repetition_penalty": 0.7,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.25,
        "logit_bias": {100: 2.0},
        "allowed_token_ids": list(range(80, 240)),
    },
}


# Each of these changes what is made of one sampled sequence: where it ends, or its text. `test_the_ends_of_a_sample`.
SAMPLED = SamplingParams(
    allowed_token_ids=[*LETTERS, 0, 1],
    temperature=3.0,
    seed=4,
    max_tokens=60,
    ignore_eos=True,
    logprobs=1,
    skip_special_tokens=False,
)
SPECIAL = {0: "<unk>", 1: "<s>"}


@pytest.fixture(scope="module")
def ends(engine):
    """By name: a request that ends or shows a sampled sequence otherwise, and (token ids, text, finish reason, stop
    reason) by definition."""
    tokens = run(engine, [(PROMPT, SAMPLED)])[0].outputs[0].token_ids
    letters = dict(zip(LETTERS, "abcdefghijklmnopqrstuvwxyz", strict=True))
    shown = [letters.get(token) or SPECIAL[token] for token in tokens]
    assert set(SPECIAL) < set(tokens)
    late = max(set(tokens), key=tokens.index)  # of all that are sampled, the one that comes last
    place = tokens.index(late)
    assert place >= 30
    stop = "".join(shown[place - 2 : place + 1])
    early = next(token for token in tokens[:10] if token in tokens[30:])
    again = next(index for index in range(30, 60) if tokens[index] == early)
    before = lambda index: "".join(shown[:index])
    return {
        "special tokens": ({}, (tokens, before(60), "length", None)),
        "no special tokens": (
            {"skip_special_tokens": True},
            (tokens, "".join(letters.get(token, "") for token in tokens), "length", None),
        ),
        "stop": ({"stop": [stop, "?"]}, (tokens[: place + 1], before(place - 2), "stop", stop)),
        "stop shown": (
            {"stop": stop, "include_stop_str_in_output": True},
            (tokens[: place + 1], before(place + 1), "stop", stop),
        ),
        "stop token": ({"stop_token_ids": [late]}, (tokens[: place + 1], before(place), "stop", late)),
        "least before a stop": (
            {"stop": shown[tokens.index(early)], "min_tokens": 30},
            (tokens[: again + 1], before(again), "stop", shown[again]),
        ),
    }


@pytest.fixture(scope="module")
def mixed(engine, ends):
    """All of them together, with sampled and plain requests between."""
    requests = [(PROMPT[index:], greedy(**asked)) for index, asked in enumerate(ASKED.values())]
    plain = [(PROMPT, greedy()), (PROMPT, SamplingParams(seed=3, max_tokens=16, ignore_eos=True, logprobs=1))]
    sampled = [(PROMPT, SamplingParams(seed=6, max_tokens=60, ignore_eos=True, logprobs=1, min_p=0.3))]
    sampled += [(PROMPT, replace(SAMPLED, **asked)) for asked, _ in ends.values()]
    together = [*requests, *plain, *sampled]
    return together, run(engine, together)


def assert_same_with_texts(results, expected) -> None:
    assert_same(results, expected)
    texts = lambda results: [(branch.text, branch.stop_reason) for result in results for branch in result.outputs]
    assert texts(results) == texts(expected)


@pytest.mark.parametrize("name", ASKED)
def test_a_greedy_request_takes_the_best_of_the_changed_logits(mixed, name):
    requests, results = mixed
    (prompt, params), result = next(
        (request, result) for request, result, key in zip(requests, results, ASKED, strict=False) if key == name
    )
    output = result.outputs[0].token_ids
    assert len(output) == 16
    raw = dense_logits([*prompt, *output])
    without = greedy(allowed_token_ids=params.allowed_token_ids if params.bad_words else None)
    plain = []
    for place, token in enumerate(output):
        now = raw[len(prompt) + place - 1]
        logits = changed(now, params, prompt, output[:place])
        assert logits.max() - logits[token] < 1e-4, f"token {place}"
        plain.append(token == changed(now, without, prompt, output[:place]).argmax())
    assert not all(plain), "a parameter that changes nothing is not tested"


def test_the_ends_of_a_sample(mixed, ends):
    _, results = mixed
    for name, (_, expected), result in zip(ends, ends.values(), results[-len(ends) :], strict=True):
        output = result.outputs[0]
        assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == expected, name


def test_min_p_keeps_what_is_likely_enough(mixed, ends):
    requests, results = mixed
    prompt, params = requests[-len(ends) - 1]
    output = results[-len(ends) - 1].outputs[0]
    assert params.min_p == 0.3
    rows = dense_logprobs([*prompt, *output.token_ids])[len(prompt) - 1 : -1]
    ratios = [np.exp(row[token] - row.max()) for row, token in zip(rows, output.token_ids, strict=True)]
    assert len(ratios) == 60
    assert 0.3 - 1e-4 < min(ratios) < 0.9, "neither too unlikely ones nor the likeliest only"
    left_out = [np.exp(row)[row < row.max() + np.log(0.3)].sum() for row in rows]
    assert np.prod(1 - np.array(left_out)) < 1e-6, "without min_p some other token would have been sampled"


def test_each_alone_gives_the_same_bits(engine, mixed):
    requests, results = mixed
    assert_same_with_texts([run(engine, [request])[0] for request in requests], results)


def test_and_when_they_preempt_each_other(engine, mixed, monkeypatch):
    """In two orders, so that every kind whose text matters is preempted after its first tokens."""
    requests, results = mixed
    greedy_and_plain = len(ASKED) + 2
    texts = {"bad words", "min tokens"}
    wanted = {index for index, name in enumerate(ASKED) if name in texts} | {*range(greedy_and_plain, len(requests))}
    with_output, preempt = set(), Scheduler._preempt

    def watched(self, request):
        with_output.update([int(request.request_id)] if request.output_token_ids else [])
        preempt(self, request)

    long = [(prompt, replace(params, max_tokens=60)) for prompt, params in requests]
    expected = run(engine, long[:greedy_and_plain]) + results[greedy_and_plain:]
    monkeypatch.setattr(Scheduler, "_preempt", watched)
    order = [*range(3), *range(14, 18), *range(11, 14), *range(3, 11)]
    with tiny_engine("float32", num_pages=32, max_model_len=512, text=TEXT) as engine:
        assert_same_with_texts(run(engine, long), expected)
        preempted = set(with_output)
        with_output.clear()
        assert_same_with_texts(run(engine, [long[i] for i in order]), [expected[i] for i in order])
    assert wanted <= preempted | {order[place] for place in with_output}


def test_logprobs_are_of_the_raw_distribution(engine):
    params = greedy(logit_bias={11: 50.0}, repetition_penalty=1.5, logprobs=3, temperature=3.0, top_k=5, seed=1)
    output = run(engine, [(PROMPT, params)])[0].outputs[0]
    exact = dense_logprobs([*PROMPT, *output.token_ids])
    for place, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        row = exact[len(PROMPT) + place - 1]
        assert entry[token].logprob == pytest.approx(row[token], abs=1e-4)
        likeliest = [key for key in entry if entry[key].rank <= 3]
        assert sorted(row[likeliest]) == pytest.approx(sorted(np.sort(row)[-3:]), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_whole_vocabulary(engine, temperature):
    params = greedy(temperature=temperature, seed=5, logprobs=-1, max_tokens=4)
    few = replace(params, logprobs=4)
    whole, some = run(engine, [(PROMPT, params), (PROMPT, few)])
    output = whole.outputs[0]
    assert output.token_ids == some.outputs[0].token_ids
    exact = dense_logprobs([*PROMPT, *output.token_ids])
    for place, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert next(iter(entry)) == token
        assert sorted(entry) == list(range(VOCAB))
        row = exact[len(PROMPT) + place - 1]
        np.testing.assert_allclose([entry[i].logprob for i in range(VOCAB)], row, atol=1e-4)
        ranks = [1 + sum(other.logprob > entry[i].logprob for other in entry.values()) for i in range(VOCAB)]
        assert [entry[i].rank for i in range(VOCAB)] == ranks
        assert all(entry[key] == value for key, value in some.outputs[0].logprobs[place].items()), "the same bits"


def test_bad_words_never_appear(engine):
    letters = engine.tokenizer.encode("abc")
    allowed = greedy(allowed_token_ids=letters, max_tokens=40, temperature=1.0, seed=1)
    bad = replace(allowed, bad_words=["ab", "ca", "bbb"])
    before, after = (r.outputs[0].token_ids for r in run(engine, [(PROMPT, allowed), (PROMPT, bad)]))
    spelled = engine.tokenizer.decode(before)
    assert any(word in spelled for word in ("ab", "ca", "bbb"))
    spelled = engine.tokenizer.decode(after)
    assert set(spelled) <= set("abc")
    assert not any(word in spelled for word in ("ab", "ca", "bbb"))
    assert len(after) == 40


def test_a_request_without_a_token_left_ends_with_an_error_and_disturbs_nobody(engine):
    expected = run(engine, [(PROMPT, greedy())])[0].outputs[0].token_ids
    [letter] = engine.tokenizer.encode("a")
    dead = greedy(allowed_token_ids=[letter], bad_words=["aaa"])
    first, second = run(engine, [(PROMPT, dead), (PROMPT, greedy())])
    assert first.outputs[0].finish_reason == "error"
    assert "no token is left at position 42" in first.outputs[0].error
    assert first.outputs[0].token_ids == [letter, letter]
    assert second.outputs[0].token_ids == expected


# ---- where it ends --------------------------------------------------------------------------------------


def test_min_tokens_holds_against_stop_tokens_and_the_end_of_sequence(engine):
    free = run(engine, [(PROMPT, greedy(max_tokens=30))])[0].outputs[0].token_ids
    stops = tuple({free[0], free[1], EOS})
    for least in (0, 1, 5, 12):
        params = greedy(stop_token_ids=stops, ignore_eos=False, min_tokens=least, max_tokens=30)
        output = run(engine, [(PROMPT, params)])[0].outputs[0]
        raw = dense_logits([*PROMPT, *output.token_ids])
        assert not set(output.token_ids[:least]) & set(stops)
        assert (len(output.token_ids) > least and output.finish_reason == "stop") or len(output.token_ids) == 30
        for place, token in enumerate(output.token_ids):
            row = raw[len(PROMPT) + place - 1].copy()
            if place < least:
                row[list(stops)] = -np.inf
            assert row.max() - row[token] < 1e-4
    assert run(engine, [(PROMPT, greedy(stop_token_ids=stops, max_tokens=30))])[0].outputs[0].token_ids == free[:1]


@pytest.fixture(scope="module")
def letters(engine):
    """A sampled text over four letters, and the request that gives it."""
    params = greedy(allowed_token_ids=engine.tokenizer.encode("abcd"), temperature=1.0, seed=4, max_tokens=60)
    output = run(engine, [(PROMPT, params)])[0].outputs[0]
    assert len(output.text) == len(output.token_ids) == 60
    return output.text, params


def streamed(engine, prompt, params) -> tuple[list[str], object]:
    """The pieces of text that the steps gave, and the last delta."""
    engine.add_request("s", prompt, params)
    deltas = []
    while engine.has_unfinished():
        deltas += [delta.outputs[0] for delta in engine.step()]
    engine.check_integrity()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    return [delta.text for delta in deltas], deltas[-1]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_stop_strings(engine, letters, include, length):
    text, params = letters
    for start in (0, 7, 30):
        stop = text[start : start + length]
        place = text.index(stop)
        end = place + length if include else place
        asked = replace(params, stop=[stop, "zz"], include_stop_str_in_output=include)
        pieces, last = streamed(engine, PROMPT, asked)
        assert "".join(pieces) == text[:end]
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)
        result = run(engine, [(PROMPT, asked), (PROMPT, params)])
        assert result[0].outputs[0].text == text[:end]
        assert len(result[0].outputs[0].token_ids) == place + length  # not one token more
        assert result[1].outputs[0].text == text


def test_text_that_does_not_become_a_stop_string_is_given_out_at_the_end(engine, letters):
    text, params = letters
    pieces, last = streamed(engine, PROMPT, replace(params, stop=text[-2:] + "z", max_tokens=60))
    assert "".join(pieces) == text
    assert (last.finish_reason, last.stop_reason) == ("length", None)


def test_a_stop_string_that_the_length_completes_is_a_stop(engine, letters):
    text, params = letters
    stop = next(text[i : i + 4] for i in range(10, 50) if text.index(text[i : i + 4]) == i)
    place = text.index(stop)
    output = run(engine, [(PROMPT, replace(params, stop=stop, max_tokens=place + 4))])[0].outputs[0]
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", stop, text[:place])
    output = run(engine, [(PROMPT, replace(params, stop=stop, max_tokens=place + 3))])[0].outputs[0]
    assert (output.finish_reason, output.stop_reason, output.text) == ("length", None, text[: place + 3])


def test_min_tokens_holds_against_stop_strings(engine, letters):
    text, params = letters
    for least in (3, 10, 25):
        output = run(engine, [(PROMPT, replace(params, stop=text[1], min_tokens=least))])[0].outputs[0]
        place = text.index(text[1], least)  # the first one after the first `least` tokens
        assert output.text == text[:place]
        assert len(output.token_ids) == place + 1


def test_a_stop_token_is_shown_if_asked_for(engine, letters):
    text, params = letters
    [stop] = engine.tokenizer.encode(text[5])
    cut = text.index(text[5])
    shown = replace(params, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert run(engine, [(PROMPT, shown)])[0].outputs[0].text == text[: cut + 1]
    assert run(engine, [(PROMPT, replace(params, stop_token_ids=[stop]))])[0].outputs[0].text == text[:cut]


def test_stopping_texts_need_a_tokenizer():
    with tiny_engine("float32") as engine:
        for asked in ({"stop": "x"}, {"bad_words": ["x"]}):
            with pytest.raises(ValueError, match=f"^{next(iter(asked))}=.* needs a tokenizer"):
                engine.add_request("a", [1], SamplingParams(**asked))
        assert not engine.has_unfinished()


# ---- scoring --------------------------------------------------------------------------------------------


def check_prompt_logprobs(result, prompt, count, start=1):
    exact = dense_logprobs(prompt)
    assert len(result.prompt_logprobs) == len(prompt)
    assert result.prompt_logprobs[:start] == [None] * min(start, len(prompt))
    for place in range(start, len(prompt)):
        entry, row = result.prompt_logprobs[place], exact[place - 1]
        assert next(iter(entry)) == prompt[place]
        assert entry[prompt[place]].logprob == pytest.approx(row[prompt[place]], abs=1e-4)
        best = sorted((value for value in entry.values() if value.rank <= max(count, 1)), key=lambda v: v.rank)
        if count:
            np.testing.assert_allclose([v.logprob for v in best[:count]], np.sort(row)[::-1][:count], atol=1e-4)
        assert len(entry) in (count, count + 1) if count else len(entry) == 1


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("length", [1, 2, 17, 40, 300])
def test_prompt_logprobs(engine, count, length):
    prompt = [(11 * i + i * i) % VOCAB for i in range(length)]
    result = run(engine, [(prompt, greedy(prompt_logprobs=count, max_tokens=3))])[0]
    check_prompt_logprobs(result, prompt, count)
    assert len(result.outputs[0].token_ids) == 3


def test_prompt_logprobs_of_the_whole_vocabulary(engine):
    result = run(engine, [(PROMPT, greedy(prompt_logprobs=-1, max_tokens=0))])[0]
    exact = dense_logprobs(PROMPT)
    for place in range(1, len(PROMPT)):
        entry = result.prompt_logprobs[place]
        np.testing.assert_allclose([entry[i].logprob for i in range(VOCAB)], exact[place - 1], atol=1e-4)


def test_prompt_logprobs_have_the_same_bits_cold_cached_chunked_and_preempted(engine):
    engine.scheduler.pool.drop_cache()
    prompts = [[(7 * i + k) % VOCAB for i in range(200)] for k in range(4)]
    requests = [(prompt, greedy(prompt_logprobs=3, max_tokens=8)) for prompt in prompts]
    cold = run(engine, requests)
    for result, prompt in zip(cold, prompts, strict=True):
        check_prompt_logprobs(result, prompt, 3)
    assert_same(run(engine, requests), cold)  # the pages are cached now
    assert_same([run(engine, [request])[0] for request in requests], cold)
    with tiny_engine("float32", num_pages=34, max_model_len=512, max_num_batched_tokens=64) as small:
        longer = [(prompt, replace(params, max_tokens=100)) for prompt, params in requests]
        found = run(small, longer)
        assert small.stats()["num_preemptions"] > 0
        assert [
            r.prompt_logprobs == c.prompt_logprobs or _unnamed(c.prompt_logprobs) == r.prompt_logprobs
            for r, c in zip(found, cold, strict=True)
        ] == [True] * 4


def _unnamed(entries):
    """Without the texts, which an engine without a tokenizer does not know."""
    return [entry and {key: value._replace(decoded_token="") for key, value in entry.items()} for entry in entries]


def test_scoring_alone_samples_nothing(engine):
    before = engine.stats()["generation_tokens"]
    prompts = [[5], PROMPT, [(13 * i) % VOCAB for i in range(512)]]  # the last fills the context
    results = run(engine, [(prompt, greedy(max_tokens=0, prompt_logprobs=0)) for prompt in prompts])
    for result, prompt in zip(results, prompts, strict=True):
        check_prompt_logprobs(result, prompt, 0)
        output = result.outputs[0]
        assert (output.token_ids, output.text, output.finish_reason) == ([], "", "length")
        assert result.finished
    assert engine.stats()["generation_tokens"] == before
    nothing = run(engine, [(PROMPT, greedy(max_tokens=0))])[0]
    assert (nothing.prompt_logprobs, nothing.outputs[0].finish_reason) == (None, "length")


def test_only_the_end_of_a_prompt_is_scored_and_the_rest_may_be_cached(engine):
    engine.scheduler.pool.drop_cache()
    context = [(3 * i) % VOCAB for i in range(160)]
    first = run(engine, [(context, greedy(max_tokens=1))])[0]
    assert first.num_cached_tokens == 0
    params = greedy(max_tokens=0, prompt_logprobs=1, prompt_logprobs_start=160)
    for end in ([1, 2, 3], [9], list(range(40))):
        result = run(engine, [([*context, *end], params)])[0]
        check_prompt_logprobs(result, [*context, *end], 1, start=160)
        assert result.num_cached_tokens == 159  # the last hidden state is needed
    whole = run(engine, [([*context, 1, 2, 3], replace(params, prompt_logprobs_start=0))])[0]
    assert whole.num_cached_tokens == 0
    result = run(engine, [([*context, 1, 2, 3], params)])[0]
    assert result.prompt_logprobs[160:] == whole.prompt_logprobs[160:]


def test_branches_share_one_scored_prompt(engine):
    result = run(engine, [(PROMPT, SamplingParams(n=3, seed=1, prompt_logprobs=1, max_tokens=5))])[0]
    check_prompt_logprobs(result, PROMPT, 1)
    assert len(result.outputs) == 3


def test_scoring_holds_few_rows_of_logits_at_once(engine):
    """A prompt as long as a step may be is scored by a program of 64 rows."""
    program = engine.runner.described.score()
    memory = engine.runner.compiler.get(program).memory_analysis()
    assert program.bucket == 64
    assert memory.temp_size_in_bytes < 8 * 64 * VOCAB * 4 + 2**20


# ---- the cache ------------------------------------------------------------------------------------------


def test_a_salt_keeps_prefixes_apart(engine):
    engine.scheduler.pool.drop_cache()
    prompt = [(5 * i) % VOCAB for i in range(100)]
    cached = lambda params, prompt=prompt: run(engine, [(prompt, params)])[0].num_cached_tokens
    assert cached(greedy()) == 0
    assert cached(greedy()) == 96
    assert cached(greedy(cache_salt="a")) == 0
    assert cached(greedy(cache_salt="a")) == 96
    assert cached(greedy(cache_salt="b")) == 0
    with_dict = {"prompt_token_ids": prompt, "cache_salt": "a"}
    assert cached(greedy(), with_dict) == 96


def test_a_tiny_temperature_is_greedy(engine):
    cold, tiny = run(engine, [(PROMPT, greedy()), (PROMPT, greedy(temperature=1e-4))])
    assert cold.outputs[0].token_ids == tiny.outputs[0].token_ids
