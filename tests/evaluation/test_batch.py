"""Batches: answers are a server's, wrong lines are error lines, and what is missing of an output is completed."""

import json

import jsonschema
import pytest
from cli_tools import run
from evaluation_tools import ENGINE

from jaxserve import LLM, SamplingParams
from jaxserve.evaluation import batch

SHAPES = [part for name, value in ENGINE.items() for part in (f"--engine.{name}", str(value))]


def request(custom_id, body, url="/v1/completions", **changes):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **changes}


def completion(custom_id, prompt, **body):
    body = {"model": "m", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **body}
    return request(custom_id, body)


def chat(custom_id, text, **body):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0, **body}
    return request(custom_id, body, "/v1/chat/completions")


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA}}
LINES = [
    completion("one", "Hello"),
    chat("two", "Hello", ignore_eos=True, logprobs=True, top_logprobs=2),
    completion("three", ["a b", "c d e"], n=2, echo=True),
    completion("four", "Hello", temperature=1.0),
    completion("five", "Hello", temperature=1.0),
    completion("six", "abc", max_tokens=0, echo=True, logprobs=1),
    chat("seven", "Colour", temperature=1.0, max_tokens=80, response_format=FORM),
]
WRONG = {
    "bad value": (completion("w1", "Hi", temperature=-1), 400, "temperature=-1.0"),
    "bad type": (completion("w2", 5), 400, "prompt: "),
    "unknown": (completion("w3", "Hi", max_token=3), 400, "max_token: unknown field (did you mean 'max_tokens'?)"),
    "too long": (completion("w4", "x" * 200), 400, "prompt: 200 tokens: must be fewer"),
    "stream": (completion("w5", "Hi", stream=True), 400, "stream: it must be left out in a batch"),
    "empty chat": (request("w6", {"messages": []}, "/v1/chat/completions"), 400, "messages="),
    "url": (request("w7", {"input": "Hi"}, "/v1/images"), None, "url='/v1/images'"),
    "method": (request("w8", {"prompt": "Hi"}, method="GET"), None, "method='GET'"),
    "body": (request("w9", "Hi"), None, "body='Hi': body must be an object"),
    "field": (request("w10", {}, extra=1), None, "extra: unknown field"),
    "id": (request("one", {"prompt": "Hi"}), None, "custom_id='one': line 1 has it already"),
    "no id": (request("", {"prompt": "Hi"}), None, "custom_id=''"),
    "list": ([1], None, "must be an object"),
    "text": ("{", None, "line 20: "),
}


def write(path, lines):
    path.write_text("".join((line if line == "{" else json.dumps(line)) + "\n" for line in lines))
    return path


def run_batch(capsys, model, folder, *more):
    options = ["-i", folder / "in.jsonl", "-o", folder / "out.jsonl", "--engine.model", model, *SHAPES, *more]
    status, out, err = run(capsys, "batch", *options)
    assert out == ""
    return status, err, [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def comparable(lines):
    """Without times."""
    lines = json.loads(json.dumps(lines))
    for line in lines:
        (line["response"] or {"body": {}})["body"].pop("created", None)
    return lines


@pytest.fixture(scope="module")
def llm(model):
    with LLM(str(model), **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """Folder and output of an uninterrupted batch of right lines."""
    folder = tmp_path_factory.mktemp("batch")
    write(folder / "in.jsonl", LINES)
    from jaxserve import EngineConfig

    config = EngineConfig(model=str(model), **ENGINE)
    assert batch.run_batch(folder / "in.jsonl", folder / "out.jsonl", config, use_tqdm=False) == 0
    return folder, [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_answers_are_in_the_order_of_the_requests_and_right(finished, llm):
    lines = finished[1]
    assert [line["custom_id"] for line in lines] == [line["custom_id"] for line in LINES]
    assert len({line["id"] for line in lines}) == 7
    assert {(line["error"], line["response"]["status_code"]) for line in lines} == {(None, 200)}
    one, two, three, four, five, six, seven = (line["response"]["body"] for line in lines)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    hello, ab, cde = (result.outputs[0].text for result in llm.generate(["Hello", "a b", "c d e"], greedy))
    assert (one["choices"][0]["text"], one["model"], one["object"]) == (hello, "m", "text_completion")
    # Not what was cached: that depends on what ran before, and a resumed batch is the same file.
    assert one["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    [chatted] = llm.chat([{"role": "user", "content": "Hello"}], greedy)
    [choice] = two["choices"]
    assert choice["message"]["content"] == chatted.outputs[0].text
    assert len(choice["logprobs"]["content"]) == 6
    texts = [choice["text"] for choice in three["choices"]]
    assert texts == ["a b" + ab, "a b" + ab, "c d e" + cde, "c d e" + cde]
    assert four["choices"][0]["text"] != five["choices"][0]["text"]  # a seed each
    assert six["choices"][0]["text"] == "abc"
    assert six["usage"]["completion_tokens"] == 0
    expected = llm.score("a", "bc")[0].token_logprobs
    assert six["choices"][0]["logprobs"]["token_logprobs"] == [None, *expected]
    assert seven["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(seven["choices"][0]["message"]["content"]), SCHEMA)


def test_a_wrong_line_is_an_error_line_and_the_status_says_so(capsys, model, tmp_path, finished):
    write(tmp_path / "in.jsonl", LINES[:6] + [line for line, _, _ in WRONG.values()])
    status, err, lines = run_batch(capsys, model, tmp_path)
    assert (status, "14 lines of" in err) == (1, True), err
    assert comparable(lines[:6]) == comparable(finished[1][:6])
    for line, (sent, code, message) in zip(lines[6:], WRONG.values(), strict=True):
        if code is None:
            assert (line["response"], line["error"]["code"]) == (None, "invalid_line")
            told = line["error"]["message"]
        else:
            assert (line["error"], line["response"]["status_code"]) == (None, code)
            assert line["custom_id"] == sent["custom_id"]
            told = line["response"]["body"]["error"]["message"]
        assert message in told


def test_unordered_answers_stay_as_they_finished(capsys, model, tmp_path, finished):
    lines = [completion("long", "Hello", max_tokens=110), *LINES]
    write(tmp_path / "in.jsonl", lines)
    status, _, found = run_batch(capsys, model, tmp_path, "--unordered")
    assert status == 0
    assert found[-1]["custom_id"] == "long"
    status, _, again = run_batch(capsys, model, tmp_path)
    assert status == 0
    assert again == found[-1:] + sorted(
        found[:-1], key=lambda line: [x["custom_id"] for x in LINES].index(line["custom_id"])
    )


def test_a_cut_output_is_completed(capsys, model, tmp_path, finished, monkeypatch):
    write(tmp_path / "in.jsonl", LINES)
    whole = (finished[0] / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(whole[4] + whole[1] + whole[0][:-9])
    started = []
    start = batch.BatchEngine._start
    monkeypatch.setattr(
        batch.BatchEngine, "_start", lambda self, number, line: (started.append(number), start(self, number, line))[1]
    )
    status, _, lines = run_batch(capsys, model, tmp_path)
    assert status == 0
    assert comparable(lines) == comparable(finished[1])
    assert sorted(started) == [0, 2, 3, 5, 6]
    assert (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)[1] == whole[1]
    assert run_batch(capsys, model, tmp_path)[0] == 0
    assert len(started) == 5


def test_files_that_cannot_be_used(capsys, model, tmp_path, finished):
    write(tmp_path / "in.jsonl", LINES[:2])
    (tmp_path / "out.jsonl").write_bytes((finished[0] / "out.jsonl").read_bytes())
    options = ["--engine.model", "no-such-model", "-o", tmp_path / "out.jsonl"]
    status, _, err = run(capsys, "batch", "-i", tmp_path / "in.jsonl", *options)
    assert (status, "out.jsonl: line 3: id='batch_req_" in err) == (1, True), err
    status, _, err = run(capsys, "batch", "-i", tmp_path / "none", *options)
    assert (status, "No such file" in err) == (1, True)
    status, _, err = run(capsys, "batch", "-i", tmp_path / "in.jsonl", "-o", tmp_path / "in.jsonl")
    assert (status, "another file than the input" in err) == (1, True)
    (tmp_path / "in.jsonl").write_text("\n")
    status, _, err = run(capsys, "batch", "-i", tmp_path / "in.jsonl", *options)
    assert (status, "at least one line" in err) == (1, True)


def test_another_models_requests_are_refused_where_the_model_has_a_name(capsys, model, tmp_path):
    write(tmp_path / "in.jsonl", [completion("a", "Hello"), completion("b", "Hello", model="other")])
    status, _, [a, b] = run_batch(capsys, model, tmp_path, "--served-model-name", "m")
    assert (status, a["response"]["status_code"], b["response"]["status_code"]) == (1, 200, 404)
