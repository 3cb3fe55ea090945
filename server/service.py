"""The engine behind the server: its start and its end, what may enter, and the outputs of a request. Knows no HTTP."""

import asyncio
import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve import metrics
from jaxserve.async_engine import AsyncEngine
from jaxserve.beam_search import BeamSearchParams
from jaxserve.config import EngineConfig
from jaxserve.input_processor import Prompt
from jaxserve.messages import EngineDeadError
from jaxserve.outputs import RequestOutput
from jaxserve.pooling_params import PoolingParams
from jaxserve.progress import CompileProgress, print_compiled
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.config import DEMO_NAME, ServerConfig
from jaxserve.server.errors import ApiError
from jaxserve.server.forms import ToolCalling
from jaxserve.server.message import MessageReader, tool_calling
from jaxserve.server.protocol import ChatCompletionRequest, TokenizeRequest
from jaxserve.server.reasoning import BEGIN, PARSERS, ReasoningReader
from jaxserve.server.tracing import Tracing
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer

_log = logging.getLogger("jaxserve.server")

RED_SECONDS = 2.0  # how long /health tells of a dead engine before the server ends

METRICS_SECONDS = 2.0

RequestParams = SamplingParams | PoolingParams | BeamSearchParams
StartEngine = Callable[[CompileProgress], AsyncEngine]


class Service:
    """One engine and who uses it. Everything but the start belongs to one event loop."""

    def __init__(self, config: ServerConfig, engine_config: EngineConfig, start: StartEngine | None = None):
        """`start` makes the engine, in a thread of its own; None starts what the two configs say."""
        self.config = config
        self.names = config.served_model_name or (str(engine_config.model or DEMO_NAME),)
        self.capacity = engine_config.max_num_seqs + config.max_queued_requests
        self.created = int(time.time())
        self.status = "loading"  # then "compiling", "ready", and "stopping" or "failed"
        self.compiled: tuple[int, int] | None = None
        self.error: str | None = None
        self.num_open = 0  # answers that are being computed or wait
        self.tasks: set[asyncio.Task] = set()  # what is being answered
        self.ended = asyncio.Event()
        self._start = start or partial(_start_engine, config, engine_config)
        self._engine: AsyncEngine | None = None
        self._chat_template: ChatTemplate | None = None
        self._template = _template_text(config.chat_template)
        self._figures = metrics.Figures()
        endpoint = config.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing(endpoint)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="jaxserve-inputs")

    # ---- life -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start the engine; return some time after it has failed, or when the task is cancelled."""
        started: asyncio.Future = asyncio.get_running_loop().create_future()
        thread = threading.Thread(target=self._load, args=(started,), name="jaxserve-start", daemon=True)
        thread.start()
        try:
            self._engine, self._chat_template = await started
        except Exception as error:
            self._fail(f"the engine could not be started: {error}")
        else:
            self.status = "ready"
            _log.info("ready: %s", ", ".join(self.names))
            self._fail(f"the engine has ended: {await self._engine.died()}")
            await asyncio.sleep(RED_SECONDS)
        self.ended.set()

    def _load(self, started: asyncio.Future) -> None:
        loop = started.get_loop()
        gc.disable()  # what a start makes stays: looking through it takes a second
        try:
            engine = self._start(self._on_compiled)
            template = _ready_template(engine.input_processor.tokenizer)
        except BaseException as error:
            told, result = started.set_exception, error
        else:
            told, result = started.set_result, (engine, template)
        finally:
            gc.freeze()
            gc.enable()
        with suppress(RuntimeError, asyncio.InvalidStateError):  # the server has ended meanwhile
            loop.call_soon_threadsafe(lambda: started.done() or told(result))

    def _on_compiled(self, done: int, total: int, name: str) -> None:
        self.status, self.compiled = "compiling", (done, total)
        print_compiled(done, total, name)

    def _fail(self, message: str) -> None:
        self.status, self.error = "failed", message
        _log.error("%s", message)

    def stop(self) -> None:
        """Let nobody in any longer."""
        if self.status != "failed":
            self.status = "stopping"

    def end_requests(self) -> None:
        """End everything that is being answered."""
        for task in list(self.tasks):
            task.cancel()

    async def close(self) -> None:
        """End the engine, if it is there; an engine whose books are wrong is an error."""
        self.stop()
        if self._engine is not None:
            if self.error is None:
                try:
                    await self._engine.check_integrity()
                except EngineDeadError as error:
                    self.error = f"the engine was not whole at the end: {error}"
                    _log.error("%s", self.error)
            await asyncio.to_thread(self._engine.close)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def starting(self) -> bool:
        """Whether the engine is not there yet."""
        return self._engine is None and self.error is None

    # ---- what there is ----------------------------------------------------------------------------------

    @property
    def engine(self) -> AsyncEngine:
        """The engine; ApiError if it is not there (yet)."""
        if self.status != "ready":
            after = {"Retry-After": "5"} if self.starting else {}
            raise ApiError(503, self.error or f"the server is {self.status}", code=self.status, headers=after)
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.engine.input_processor.tokenizer
        if tokenizer is None:
            raise ApiError(400, "this model has no tokenizer")
        return tokenizer

    @property
    def max_model_len(self) -> int:
        return self.engine.input_processor.max_model_len

    @property
    def default_sampling_params(self) -> SamplingParams:
        return self.engine.input_processor.defaults

    def check_model(self, name: str | None) -> str:
        """The name that the answer has; 404 for another model's."""
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            message = f"model={name!r}: no such model: this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self.names[0]

    # ---- requests ---------------------------------------------------------------------------------------
    async def metrics(self) -> bytes:
        """The figures of now in Prometheus' format; the last ones known where the engine is in a long step."""
        if self._engine is not None:
            with suppress(EngineDeadError, TimeoutError):
                async with asyncio.timeout(METRICS_SECONDS):
                    self._figures = await self._engine.metrics()
        return metrics.exposition(self._figures, self.names[0])

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Room for `count` answers; 429 if too many wait already."""
        if count > self.capacity:
            raise ApiError(
                400, f"prompt: {count} answers are asked for: must be at most {self.capacity}", param="prompt"
            )
        if self.num_open + count > self.capacity:
            message = f"{self.num_open} answers are under way or wait, and at most {self.capacity} may"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
        self.num_open += count
        try:
            yield
        finally:
            self.num_open -= count

    async def in_thread(self, function: Callable, *arguments: Any) -> Any:
        """Tokenisers and templates may take long: the event loop does not wait for them."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def checked(self, prompts: Sequence[Prompt], params: RequestParams) -> list[dict[str, Any]]:
        """The prompts as token ids and texts; ValueError for what the engine could not honour."""
        check = self.engine.input_processor.check
        return [check(prompt, params) for prompt in prompts]

    def tool_calling(self, request: ChatCompletionRequest) -> ToolCalling | None:
        """The tool calls that the answer may hold."""
        template = request.chat_template or self._template
        return tool_calling(request, self._chat_template, self.tokenizer, template, self.config.tool_call_parser)

    def thinks_at_once(self, prompt: str) -> bool | None:
        """Whether the answer begins within thoughts; None where thoughts are not told from it."""
        if self.config.reasoning_parser is None:
            return None
        return PARSERS[self.config.reasoning_parser] or prompt.rstrip().endswith(BEGIN)

    def message_reader(
        self, request: ChatCompletionRequest, params: SamplingParams, begun: bool | None, tools: ToolCalling | None
    ) -> MessageReader:
        """What reads a choice of the answer to a chat; `begun` is what `thinks_at_once` says."""
        reasoning = None
        # An answer of a given form is all answer, but for the grammars of tools, which have room for thoughts.
        if begun is not None and (params.structured_outputs is None or tools is not None):
            reasoning = ReasoningReader(begun=begun)
        shows = request.include_reasoning is not False
        return MessageReader(reasoning, None if tools is None else tools.reader(), shows_reasoning=shows)

    def chat_prompt(self, messages: list[dict], rendering: dict[str, Any]) -> dict[str, Any]:
        if "chat_template" not in rendering:
            rendering = rendering | {"chat_template": self._template}
        elif not self.config.trust_request_chat_template:
            raise ValueError("chat_template: this server takes no templates from its clients: it must be left out")
        text = self._chat_template.render(messages, **rendering)
        ids = self.engine.input_processor.encode(text, add_special_tokens=False, field="messages")
        return {"prompt": text, "prompt_token_ids": ids}

    def tokens(self, request: TokenizeRequest) -> list[int]:
        """The token ids of a text or a chat."""
        if (request.prompt is None) == (request.messages is None):
            raise ValueError("prompt: it must be given, or messages, and not both")
        if request.messages is not None:
            chat = ChatCompletionRequest.model_construct(**request.model_dump(exclude_none=True))
            return self.chat_prompt(request.messages, chat.rendering())["prompt_token_ids"]
        special = request.add_special_tokens is not False
        return self.tokenizer.encode(request.prompt, add_special_tokens=special)

    async def outputs(
        self,
        prompts: Sequence[dict[str, Any]],
        params: RequestParams,
        *,
        arrival_time: float,
        interval: int = 1,
    ) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the prompt, what is new), as it comes; `interval` tokens of a choice are joined, after the first.

        Whoever reads slowly finds more joined. Leaving the iterator ends the requests.
        """
        held: dict[int, RequestOutput] = {}
        begun: set[int] = set()
        async with aclosing(
            _merged([self.engine.generate(prompt, params, arrival_time=arrival_time) for prompt in prompts])
        ) as merged:
            async for index, output in merged:
                if index in held:
                    held[index].extend(output)
                    output = held.pop(index)
                few = max(len(new.token_ids) for new in output.outputs) < interval
                if few and index in begun and not output.finished:
                    held[index] = output
                    continue
                begun.add(index)
                yield index, output


async def _merged(streams: Sequence[AsyncIterator]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """(index of the stream, output) of several streams, whichever comes first."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index, output = waiting.pop(task), task.result()
                if not output.finished:
                    waiting[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _start_engine(config: ServerConfig, engine_config: EngineConfig, progress: CompileProgress) -> AsyncEngine:
    return AsyncEngine(engine_config, run_in=config.run_in, on_compiled=progress)


def _template_text(template: str | None) -> str | None:
    """A template, or what the file of this name holds."""
    if template is None or "{" in template:
        return template
    return Path(template).read_text(encoding="utf-8")


def _ready_template(tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The model's chat template, with everything imported that the first chat would import."""
    if tokenizer is None:
        return None
    template = ChatTemplate(tokenizer)
    with suppress(ValueError):  # no template, or one that wants another chat: whoever chats is told
        template.render([{"role": "user", "content": "Hello"}])
    return template
