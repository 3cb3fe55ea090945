"""`use_beam_search` in the server and in batches: the answers are those of `LLM.beam_search`."""

import json

import openai
import pytest
from checkpoint_tools import CHAT_TEMPLATE

from jaxserve import LLM, BeamSearchParams
from jaxserve.evaluation.batch import BatchEngine, read_batch

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 8}
PARAMS = BeamSearchParams(beam_width=3, max_tokens=8)


@pytest.fixture(scope="module")
def llm(oracle):
    return LLM(engine=oracle)


def shown(result):
    return [(sequence.text, sequence.finish_reason) for sequence in result.sequences]


def choices(answer):
    return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]


def test_completions(server, llm):
    expected = llm.beam_search(["Hello", "a b c"], PARAMS)
    answer = server.post(COMPLETIONS, {"prompt": ["Hello", "a b c"], **BEAMS}).json()
    assert choices(answer) == [pair for result in expected for pair in shown(result)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    tokens = sum(len(sequence.token_ids) for result in expected for sequence in result.sequences)
    assert answer["usage"]["completion_tokens"] == tokens
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"use_beam_search": True, "length_penalty": 0.0, "early_stopping": True, "ignore_eos": True}
        body = {"model": "tiny", "prompt": "Hello", "n": 2, "best_of": 5, "max_tokens": 6, "temperature": 0}
        answer = client.completions.create(**body, extra_body=extra)
    params = BeamSearchParams(beam_width=5, n=2, max_tokens=6, length_penalty=0.0, early_stopping=True, ignore_eos=True)
    assert [(c.text, c.finish_reason) for c in answer.choices] == shown(llm.beam_search("Hello", params)[0])


def test_chats(server, llm):
    messages = [{"role": "user", "content": "Hello"}]
    answer = server.post(CHAT, {"messages": messages, **BEAMS}).json()
    prompt = llm.chat_template.prompt(messages, chat_template=CHAT_TEMPLATE)
    found = [(choice["message"]["content"], choice["finish_reason"]) for choice in answer["choices"]]
    assert found == shown(llm.beam_search([prompt], PARAMS)[0])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stream": True}, "stream"),
        ({"logprobs": 0}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"temperature": 0.5}, "temperature"),
        ({"stop": "x"}, "stop"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 65}, "best_of"),
        ({"n": 65}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 1.0}, "length_penalty"),
    ],
)
def test_what_does_not_go_with_beams_is_a_400_that_names_the_field(server, fields, field):
    answer = server.post(COMPLETIONS, {"prompt": "Hello", **BEAMS, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_client_that_leaves_takes_its_beams_along(server):
    extra = {"use_beam_search": True, "ignore_eos": True}
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=0.15)
    with client, pytest.raises(openai.APITimeoutError):
        client.completions.create(model="tiny", prompt="Hello", n=30, max_tokens=500, extra_body=extra)


def test_in_a_batch(llm, tmp_path):
    body = {"prompt": "Hello", **BEAMS}
    lines = [{"custom_id": str(i), "method": "POST", "url": COMPLETIONS, "body": body} for i in range(2)]
    lines.append({**lines[0], "custom_id": "2", "body": {"prompt": "Hello", "max_tokens": 5, "temperature": 0}})
    lines.append({**lines[0], "custom_id": "3", "body": {**body, "logprobs": 1}})
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = dict(BatchEngine(llm.engine, "tiny").answers(iter(enumerate(read_batch(file))), 8))
    expected = shown(llm.beam_search("Hello", PARAMS)[0])
    assert [choices(answers[i]["response"]["body"]) for i in range(2)] == [expected] * 2
    assert [answers[i]["response"]["status_code"] for i in range(4)] == [200, 200, 200, 400]
    llm.engine.check_integrity()
