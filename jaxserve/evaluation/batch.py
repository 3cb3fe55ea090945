"""OpenAI's batch format without a server: a file of requests in, a file of answers out. May be killed and run again."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from jaxserve.beam_search import BeamSearchParams
from jaxserve.config import EngineConfig
from jaxserve.evaluation.executors import items_at_once
from jaxserve.evaluation.results import ResultsFile
from jaxserve.outputs import RequestOutput
from jaxserve.pooling_params import PoolingParams
from jaxserve.progress import item_bar
from jaxserve.request import GRAMMAR_GAVE_UP, NO_TOKEN_LEFT
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.answers import AnswerBuilder, ChatBuilder, CompletionBuilder, GenerationFailed
from jaxserve.server.config import DEMO_NAME
from jaxserve.server.embeddings import FIELD_NAMES, EmbeddingBuilder, EmbeddingRequest
from jaxserve.server.errors import ApiError, refusals, wrong_body
from jaxserve.server.forms import ToolCalling
from jaxserve.server.message import MessageReader, tool_calling
from jaxserve.server.protocol import ChatCompletionRequest, CompletionRequest
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.validation import require

if TYPE_CHECKING:
    from jaxserve.engine import Engine

TYPES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
}
AnyRequest = CompletionRequest | ChatCompletionRequest | EmbeddingRequest
INVALID_LINE = "invalid_line"
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class BatchLine:
    """One line of the input: a request, or why it is none.

    digest: of the line's number and text, so that an answer can be told to be this line's.
    error: what is wrong with it; of an `invalid_line` there is no request that could be refused.
    """

    digest: str
    custom_id: str | None = None
    request: AnyRequest | None = None
    error: ApiError | None = None

    def answer(self, status: int, body: dict[str, Any]) -> dict[str, Any]:
        """The line of the output for a request that was answered, or refused."""
        response = {"status_code": status, "request_id": self.digest, "body": body}
        return {"id": self.id, "custom_id": self.custom_id, "response": response, "error": None}

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The line of the output for an error."""
        if error.code == INVALID_LINE:
            told = {"code": error.code, "message": error.message}
            return {"id": self.id, "custom_id": self.custom_id, "response": None, "error": told}
        return self.answer(error.status, json.loads(error.body()))

    @property
    def id(self) -> str:
        return f"batch_req_{self.digest}"


def read_batch(path: Path, model_name: str | None = None) -> list[BatchLine]:
    """The lines of a batch file, wrong ones with their errors. `model_name`, if given, is the only one requests may
    name. ValueError if the file cannot be read or holds nothing.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"input={str(path)!r}: {error.strerror}") from None
    lines, seen = [], {}
    for number, raw in enumerate(content.splitlines(), 1):
        if raw.strip():
            lines.append(_line(number, raw, seen, model_name))
    require(bool(lines), "input", str(path), "a file with at least one line")
    return lines


def _line(number: int, raw: bytes, seen: dict[str, int], model_name: str | None) -> BatchLine:
    digest = hashlib.sha256(b"%d\n%s" % (number, raw)).hexdigest()[:24]
    custom_id = None
    try:
        values = json.loads(raw)
        require(isinstance(values, dict), f"line {number}", values, "an object")
        custom_id = values.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            custom_id = None
            raise ValueError(f"custom_id={values.get('custom_id')!r}: custom_id must be a text that is not empty")
        if custom_id in seen:
            raise ValueError(f"custom_id={custom_id!r}: line {seen[custom_id]} has it already")
        seen[custom_id] = number
        wrong = next((name for name in values if name not in _FIELDS), None)
        if wrong is not None:
            raise ValueError(f"{wrong}: unknown field: a line has {', '.join(_FIELDS)}")
        require(values.get("method") == "POST", "method", values.get("method"), "'POST'")
        url, body = values.get("url"), values.get("body")
        require(isinstance(url, str) and url in TYPES, "url", url, f"one of {', '.join(TYPES)}")
        require(isinstance(body, dict), "body", body, "an object")
    except ValueError as error:
        return BatchLine(digest, custom_id, error=ApiError(400, f"line {number}: {error}", code=INVALID_LINE))
    try:
        request = _request(TYPES[url], json.dumps(body), model_name)
    except ApiError as error:
        return BatchLine(digest, custom_id, error=error)
    return BatchLine(digest, custom_id, request)


def _request(kind: type, body: str, model_name: str | None) -> AnyRequest:
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise wrong_body(error, list(kind.model_fields)) from None
    if getattr(request, "stream", None):
        raise ApiError(400, "stream: it must be left out in a batch", param="stream", code="invalid_value")
    if model_name is not None and request.model not in (None, model_name):
        message = f"model={request.model!r}: no such model: this batch has {model_name}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return request


# ---- running ----------------------------------------------------------------------------------------------


@dataclass
class _Open:
    """A request under way."""

    number: int
    line: BatchLine
    builder: AnswerBuilder
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)


class BatchEngine:
    """Requests of a batch through one engine, answered as they finish."""

    def __init__(self, engine: "Engine", model_name: str):
        """`model_name` stands in answers to requests that name none."""
        self._engine, self._model_name = engine, model_name
        if engine.tokenizer is None:
            raise ValueError("tokenizer: a batch needs one, and this model has none")
        self._template = ChatTemplate(engine.tokenizer)
        self._open: dict[str, _Open] = {}
        self._num_requests = 0

    def answers(self, lines: Iterator[tuple[int, BatchLine]], most: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number of the line, its answer), as they finish; `most` prompts are under way at once."""
        more = True
        while more or self._open:
            while more and len(self._open) < most:
                number, line = next(lines, (None, None))
                more = line is not None
                if more and (refused := self._start(number, line)) is not None:
                    yield number, refused
            for output in self._engine.step() if self._open else ():
                item = self._open.get(output.request_id)
                if item is not None and self._finished(item, output):
                    yield item.number, self._answer(item)

    def _start(self, number: int, line: BatchLine) -> dict[str, Any] | None:
        """Hand a request to the engine; returns its line if it is refused."""
        try:
            if line.error is not None:
                raise line.error
            with refusals(FIELD_NAMES if isinstance(line.request, EmbeddingRequest) else None):
                builder, params = self._builder(line)
        except ApiError as error:
            return line.failure(error)
        item = _Open(number, line, builder)
        for prompt in builder.prompts:
            request_id = f"line-{self._num_requests}"
            self._engine.add_request(request_id, prompt, params)
            self._num_requests += 1
            self._open[request_id], item.outputs[request_id] = item, None
        return None

    def _builder(self, line: BatchLine) -> tuple[AnswerBuilder, SamplingParams | PoolingParams | BeamSearchParams]:
        """What makes the answer, and what the engine is asked for."""
        request, processor = line.request, self._engine.input_processor
        names = {"request_id": line.digest, "model": request.model or self._model_name}
        if isinstance(request, EmbeddingRequest):
            params = request.pooling_params()
            checked = [processor.check(prompt, params) for prompt in request.prompts()]
            return EmbeddingBuilder(request, params, checked, self._engine.tokenizer, **names), params
        params = request.sampling_params(self._engine.default_sampling_params)
        beams = request.beam_search(params)
        if params.seed is None:  # not by when it arrives: a resumed batch gives the same answers
            params = replace(params, seed=int(line.digest[:15], 16))
        if isinstance(request, ChatCompletionRequest):
            build, prompts = ChatBuilder, [self._template.prompt(request.messages, **request.rendering())]
            tools = tool_calling(request, self._template, self._engine.tokenizer, request.chat_template)
            if tools is not None:
                build, params = partial(ChatBuilder, reader=partial(_reader, tools)), tools.params(params)
        else:
            build, prompts = CompletionBuilder, request.prompts()
        asked = beams or params
        checked = [processor.check(prompt, asked) for prompt in prompts]
        return build(request, params, checked, self._engine.tokenizer, **names), asked

    def _finished(self, item: _Open, output: RequestOutput) -> bool:
        """Take in what is new; whether that was the last of the line's prompts."""
        known = item.outputs[output.request_id]
        if known is None:
            item.outputs[output.request_id] = output
        else:
            known.extend(output)
        if output.finished:
            del self._open[output.request_id]
        return output.finished and all(o is not None and o.finished for o in item.outputs.values())

    def _answer(self, item: _Open) -> dict[str, Any]:
        try:
            answer = item.builder.whole(list(item.outputs.values()))
        except GenerationFailed as error:
            status = 400 if str(error).startswith((NO_TOKEN_LEFT, GRAMMAR_GAVE_UP)) else 500
            return item.line.failure(ApiError(status, str(error), code="generation_failed"))
        body = json.loads(answer.model_dump_json())
        body["usage"].pop("prompt_tokens_details", None)  # what was cached depends on where a batch was resumed
        return item.line.answer(200, body)


def _reader(tools: ToolCalling) -> MessageReader:
    return MessageReader(tools=tools.reader())


def run_batch(
    input_file: str | Path,
    output_file: str | Path,
    config: EngineConfig,
    *,
    model_name: str | None = None,
    ordered: bool = True,
    overwrite: bool = False,
    use_tqdm: bool | None = None,
) -> int:
    """Answer what has no answer yet; returns how many lines of the whole output are errors.

    `model_name` is the only one that requests may have; None lets them have any.
    The output is in input order when the last answer is there, unless `ordered` is False. ValueError for files that
    cannot be used, before a model is loaded.
    """
    lines, path = read_batch(Path(input_file), model_name), Path(output_file)
    require(Path(input_file).resolve() != path.resolve(), "output", str(path), "another file than the input")
    numbers = {line.id: number for number, line in enumerate(lines)}
    file = ResultsFile(path, len(lines), lambda values: _number(values, numbers), overwrite=overwrite)
    try:
        missing = file.missing
        with item_bar(len(lines), len(lines) - len(missing), use_tqdm) as bar:
            for number in missing:
                if lines[number].error is not None:
                    file.append(number, lines[number].failure(lines[number].error))
                    bar.update()
            for number, answer in _computed(lines, file.missing, config):
                file.append(number, answer)
                bar.update()
        if ordered:
            file.finish()
        return sum(is_error(line) for line in file.lines.values())
    finally:
        file.close()


def _computed(lines: list[BatchLine], missing: list[int], config: EngineConfig) -> Iterator[tuple[int, dict[str, Any]]]:
    if not missing:
        return
    from jaxserve.llm import LLM  # JAX is loaded when the files are known to be right

    with LLM(config=config) as llm:
        wanted = iter([(number, lines[number]) for number in missing])
        yield from BatchEngine(llm.engine, str(config.model or DEMO_NAME)).answers(wanted, items_at_once(config))


def _number(values: dict[str, Any], numbers: dict[str, int]) -> int:
    if values["id"] not in numbers:
        raise ValueError(f"id={values['id']!r} is the answer to no line of the input")
    return numbers[values["id"]]


def is_error(line: dict[str, Any]) -> bool:
    """Whether a line of the output tells of a failure."""
    return line["error"] is not None or line["response"]["status_code"] != 200
