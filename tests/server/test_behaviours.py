"""What engines of this kind got wrong in public, each kind made right: streamed and not."""

import itertools
import json

import pytest
from engine_tools import run
from server_tools import VOCAB, events, joined, local_server, whole

from jaxserve import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def ask(server, request):
    """choices(body), by index, of a completion."""

    def choices(body):
        if not request.param:
            return whole(server.post(COMPLETIONS, body).json())
        return joined(events(server.post(COMPLETIONS, {**body, "stream": True})))

    return choices


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def refused(server, request):
    """The error of a body that must be refused before anything is sent, while a good request goes on unharmed."""

    def error(body, path=COMPLETIONS):
        response = server.post(path, {**body, "stream": request.param})
        assert response.status_code == 400, response.text
        assert response.headers["content-type"] == "application/json"
        assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2}).status_code == 200
        return response.json()["error"]

    return error


def text_of(oracle, prompt="Hello", **params):
    return run(oracle, [(prompt, SamplingParams(**params))])[0].outputs[0].text


SAMPLED = {"temperature": 1.5, "max_tokens": 60, "ignore_eos": True, "seed": 8}


@pytest.mark.parametrize("include", [False, True])
def test_text_that_may_become_a_stop_string_is_held_back(ask, oracle, include):
    """Every byte is a token here, so a stop string splits in every way."""
    text = text_of(oracle, **SAMPLED)
    for start, length in itertools.product((0, 3, 20), (1, 2, 7, 13)):
        stop = text[start : start + length]
        body = {"prompt": "Hello", **SAMPLED, "stop": [stop, "never"], "include_stop_str_in_output": include}
        at = text.index(stop)
        choice = ask(body)[0]
        assert choice["text"] == text[: at + (length if include else 0)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_a_length_that_hides_a_stop(ask, oracle):
    """A stop at the cap's last token is a stop, one beyond it is none."""
    tokens = run(oracle, [("Hello", SamplingParams(**SAMPLED))])[0].outputs[0].token_ids
    stop = tokens[6]
    first = tokens.index(stop)
    body = {"prompt": "Hello", **SAMPLED, "stop_token_ids": [stop]}
    assert ask({**body, "max_tokens": first + 1})[0]["finish_reason"] == "stop"
    assert ask({**body, "max_tokens": first + 1})[0]["stop_reason"] == stop
    assert ask({**body, "max_tokens": first})[0]["finish_reason"] == "length"


def test_min_tokens_against_all_kinds_of_stops(ask, oracle, server):
    text = text_of(oracle, **SAMPLED)
    body = {"prompt": "Hello", **SAMPLED, "ignore_eos": False, "min_tokens": 50}
    for stops in ({"stop": text[2]}, {"stop_token_ids": list(range(40, 80))}, {"stop": text[3:6]}):
        server_side = {**body, **stops, "logprobs": 0}
        choice = ask(server_side)[0]
        assert len(choice["logprobs"]["tokens"]) >= 50


@pytest.mark.parametrize(
    "bias", [{"191222": -100}, {"300": 1}, {"-1": 1}, {"1.5": 1}, {"x": 1}, {"": 1}, {"1": 1, "1_0": 2}, {"1": 101}]
)
def test_a_bias_for_what_is_no_token(refused, bias):
    error = refused({"prompt": "x", "logit_bias": bias})
    assert error["param"] == "logit_bias"
    wrong = next(iter(bias)) if bias != {"1": 1, "1_0": 2} else "1_0"
    assert wrong in error["message"]


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "prompt"])
def test_ids_out_of_range(refused, field):
    for wrong in (VOCAB, -1, 2**31, 2**63, 10**30):
        body = {"prompt": "x", field: [1, wrong]}
        assert refused(body)["param"] == field


def test_more_logprobs_than_there_may_be(refused):
    assert refused({"prompt": "x", "logprobs": 21})["param"] == "logprobs"
    assert refused({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, CHAT)["param"] == "top_logprobs"
    assert refused({"messages": HELLO, "top_logprobs": 1}, CHAT)["param"] == "top_logprobs"


@pytest.mark.parametrize("prompt", ["", [], [[]], ["", "x"], ["x", ""], [[1], []]])
def test_an_empty_prompt(refused, prompt):
    assert "no tokens" in refused({"prompt": prompt})["message"]


def strict_json(text):
    def no_constant(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=no_constant)


def test_logprobs_are_always_json(server, ask, oracle):
    body = {"prompt": "Hello", "echo": True, "logprobs": 1, "top_k": 1, "max_tokens": 4, "ignore_eos": True}
    body |= {"allowed_token_ids": [70], "logit_bias": {"71": -100}}
    answer = strict_json(server.post(COMPLETIONS, body).text)
    want = run(oracle, [("Hello", SamplingParams(max_tokens=0, prompt_logprobs=1))])[0].prompt_logprobs
    expected = [next(iter(entry.values())).logprob for entry in want[1:]]
    got = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert got[0] is None
    assert got[1:5] == pytest.approx(expected)  # of the unfiltered distribution
    for line in server.post(COMPLETIONS, {**body, "stream": True}).text.split("\n\n")[:-2]:
        strict_json(line.removeprefix("data: "))


@pytest.mark.parametrize("prompt", ["Hello", "two\n lines  and spaces\n", "hé → 🙂", "<s>", " "])
@pytest.mark.parametrize("max_tokens", [0, 7])
def test_echo_with_logprobs(ask, oracle, prompt, max_tokens):
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    choice = ask({**body, "ignore_eos": True})[0]
    lists, ids = choice["logprobs"], oracle.tokenizer.encode(prompt)
    assert {len(values) for values in lists.values()} == {len(ids) + max_tokens}
    assert choice["text"].startswith(prompt)
    assert "".join(lists["tokens"]) == choice["text"]
    lengths = [len(token) for token in lists["tokens"]]
    assert lists["text_offset"] == [0, *itertools.accumulate(lengths)][:-1]
    assert [value is None for value in lists["token_logprobs"]] == [True, *[False] * (len(ids) - 1 + max_tokens)]
    want = run(oracle, [(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))])[0].prompt_logprobs
    for got, entry, token in zip(lists["token_logprobs"][1:], want[1:], ids[1:], strict=False):
        assert got == pytest.approx(entry[token].logprob)


@pytest.mark.parametrize("field", ["prompt", "stop", "bad_words", "cache_salt", "messages", "key"])
def test_a_lone_surrogate(server, field):
    values = {"prompt": '"\\ud800"', "stop": '"x\\udfff"', "bad_words": '["\\ud800"]', "cache_salt": '"\\ud800"'}
    values |= {"messages": '[{"role": "user", "content": "\\ud83d"}]', "key": '"\\ud800"'}
    path, start = (CHAT, "{") if field == "messages" else (COMPLETIONS, '{"prompt": "x", ')
    if field == "prompt":
        start = "{"
    name = '"\\ud800"' if field == "key" else f'"{field}"'
    for stream in ("false", "true"):
        content = f'{start}{name}: {values[field]}, "stream": {stream}}}'
        headers = {"Content-Type": "application/json"}
        response = server.client.post(path, content=content, headers=headers)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]
    pair = server.client.post(COMPLETIONS, content='{"prompt": "\\ud83d\\ude42", "max_tokens": 1}', headers=headers)
    assert pair.json()["usage"]["prompt_tokens"] == 4


def test_a_prompt_that_is_too_long_is_refused_before_any_byte(refused):
    for prompt in ("x" * 600, [3] * 600, "x" * 100_000):
        assert refused({"prompt": prompt})["param"] == "prompt"
    assert refused({"messages": [{"role": "user", "content": "x" * 600}]}, CHAT)["param"] in ("messages", "prompt")


def test_a_tiny_temperature_is_greedy(ask, oracle):
    greedy = text_of(oracle, temperature=0, max_tokens=20, ignore_eos=True)
    for temperature in (1e-4, 1e-30, 5e-324, 0.0):
        body = {"prompt": "Hello", "temperature": temperature, "max_tokens": 20, "ignore_eos": True}
        assert ask(body)[0]["text"] == greedy


def test_without_filters_it_is_the_plain_distribution(ask, oracle):
    """Many answers of one token: every token that is likely enough comes."""
    want = run(oracle, [("Hello", SamplingParams(max_tokens=1, logprobs=-1))])[0].outputs[0].logprobs[0]
    body = {"prompt": "Hello", "temperature": 1, "max_tokens": 1, "n": 100, "seed": 1, "logprobs": 0}
    chosen = [choice["logprobs"]["token_logprobs"][0] for choice in ask({**body, "ignore_eos": True}).values()]
    assert len(set(chosen)) > 20  # a random model over 300 tokens is nearly flat; greedy gives one
    values = [found.logprob for found in want.values()]
    assert all(min(abs(value - got) for value in values) < 1e-4 for got in chosen)


STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_template_refuses_is_told_in_its_own_words(stream):
    user, system = HELLO[0], {"role": "system", "content": "x"}
    with local_server(chat_template=STRICT) as server:
        for messages, words in (
            ([user, user], "roles must alternate"),
            ([system, user], "the user speaks first"),
            ([], "at least one message"),
            ([{"role": "user"}], "content"),
        ):
            response = server.post(CHAT, {"messages": messages, "stream": stream})
            assert response.status_code == 400
            assert words in response.json()["error"]["message"]
        assert server.post(CHAT, {"messages": HELLO, "max_tokens": 1}).status_code == 200
    with local_server(chat_template=None) as server:
        response = server.post(CHAT, {"messages": HELLO, "stream": stream})
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]


def test_when_a_request_forbids_every_token_in_the_middle(server):
    """Words of several tokens that leave nothing to say after the first: its own error, not the server's."""
    letters = "ab"
    words = [first + second for first in letters for second in letters]
    ids = server.engine.tokenizer.encode(letters)
    body = {"prompt": "Hello", "allowed_token_ids": ids, "bad_words": words, "max_tokens": 9, "temperature": 0}
    response = server.post(COMPLETIONS, body)
    assert response.status_code == 400
    assert "no token is left" in response.json()["error"]["message"]
    # A stream that has begun ends in an event of its own; where the steps outran the first event, the status tells it.
    response = server.post(COMPLETIONS, {**body, "stream": True})
    told = response.text if response.status_code == 400 else response.text.split("\n\n")[-2].removeprefix("data: ")
    assert "no token is left" in json.loads(told)["error"]["message"]
