"""The front door for asyncio: every request is an async iterator, and the engine's loop runs elsewhere.

The loop is in a thread or in a process of its own (`channels.py`); what goes there and back are the plain messages of
`messages.py`. The tokens of one step arrive as one batch and wake each event loop once. Consumers never slow the
engine down: what a slow one has not fetched yet is merged into one output.
"""

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from time import monotonic
from typing import TYPE_CHECKING, Any, no_type_check

from jaxserve.beam_search import BeamSearchParams
from jaxserve.channels import ProcessChannel, ThreadChannel
from jaxserve.config import EngineConfig
from jaxserve.messages import (
    Abort,
    AddRequest,
    Answer,
    CheckIntegrity,
    Compiled,
    Died,
    EngineDeadError,
    GetFigures,
    GetStats,
    Message,
    Outputs,
    Refused,
    Reply,
    Started,
    UpdateParams,
)
from jaxserve.metrics import Figures
from jaxserve.outputs import EmbeddingOutput, RequestOutput
from jaxserve.pooling import embedding_of
from jaxserve.pooling_params import PoolingParams
from jaxserve.progress import CompileProgress, print_compiled
from jaxserve.sampling_params import SamplingParams
from jaxserve.validation import require

if TYPE_CHECKING:
    from jaxserve.engine import Engine, Prompt
    from jaxserve.input_processor import InputProcessor

RUN_IN = ("thread", "process")


class AsyncEngine:
    """Continuous batching for any number of asyncio tasks, in one event loop or several.

        async with AsyncEngine(model="path/to/folder") as engine:
            async for delta in engine.generate("The sky is", SamplingParams(max_tokens=20)):
                print(delta.outputs[0].text, end="")

    Options are those of `EngineConfig`, as one object or as keywords; `engine` takes over an engine that exists
    (`Engine.from_flax`), which nobody else may use from then on. `run_in="process"` starts a new Python: a script
    needs its `if __name__ == "__main__":`, and JAX's settings there come from the environment.
    The constructor returns when the model is loaded; ValueError for wrong options. `on_compiled(done, total, name)` is
    called, in another thread, while a warm-up compiles. In a running event loop use
    `await asyncio.to_thread(AsyncEngine, config)` to let others go on meanwhile.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        engine: "Engine | None" = None,
        run_in: str = "thread",
        on_compiled: CompileProgress = print_compiled,
        **options,
    ):
        require(run_in in RUN_IN, "run_in", run_in, f"one of {', '.join(map(repr, RUN_IN))}")
        if (config is not None) + bool(options) + (engine is not None) > 1:
            raise TypeError("give one of: a config, options, an engine")
        if engine is None and config is None:
            config = EngineConfig.from_dict(options)
        self._run_in = run_in
        self._mailboxes = _Mailboxes(on_compiled)
        deliver = self._mailboxes.deliver  # not a method of this object: it must not live as long as the thread
        if run_in == "process":
            if engine is not None or config.mesh is not None:
                raise ValueError("run_in='process': an engine or a mesh cannot be sent to another process")
            self._channel = ProcessChannel(config, deliver)
        else:
            self._channel = ThreadChannel(lambda progress: engine or _new_engine(config, progress), deliver)
        self._close = weakref.finalize(self, self._channel.close)  # also when it is dropped, and at exit
        try:
            self._mailboxes.wait_for_start()
        except BaseException:
            self.close()
            raise

    @property
    def input_processor(self) -> "InputProcessor":
        """What checks requests, and has the tokenizer: a front may check in threads of its own before it sends."""
        return self._mailboxes.input_processor

    # ---- requests ---------------------------------------------------------------------------------------

    @no_type_check  # the engine checks: the tests' type checker would come first with another error
    async def generate(
        self,
        prompt: "Prompt",
        sampling_params: SamplingParams | PoolingParams | BeamSearchParams | None = None,
        *,
        request_id: str | None = None,
        arrival_time: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield what each step adds to the request (new tokens and text only, as `Engine.step`), until it is finished.

        Outputs that wait to be fetched are merged. The request starts with the first `anext`; leaving the iterator,
        closing it, or cancelling the task aborts it, and its pages are free after the step that runs.
        ValueError (before the first output) for a prompt or parameters that cannot be honoured and for a
        `request_id` that is running; EngineDeadError when the engine ends, for whatever reason. `arrival_time` as in
        `Engine.add_request`.
        """
        mailbox = self._mailboxes.open(request_id)
        try:
            arrival_time = monotonic() if arrival_time is None else arrival_time
            self._channel.send(AddRequest(mailbox.key, _snapshot(prompt), sampling_params, arrival_time))
            finished = False
            while not finished:
                output = await mailbox.take()
                finished = output.finished
                yield output
        finally:
            if self._mailboxes.forget(mailbox):
                self._channel.send(Abort(mailbox.key))

    @no_type_check
    async def embed(
        self, prompt: "Prompt", pooling_params: PoolingParams | None = None, *, request_id: str | None = None
    ) -> EmbeddingOutput:
        """The embedding of a prompt; see `LLM.embed`. Cancelling the task aborts it; errors are those of `generate`."""
        params = PoolingParams() if pooling_params is None else pooling_params
        async with aclosing(self.generate(prompt, params, request_id=request_id)) as outputs:
            async for output in outputs:
                if output.finished:
                    return embedding_of(output)
        raise RuntimeError("the outputs have ended before the request")

    def abort(self, request_id: str) -> None:
        """End a request: its iterator's last output has `finish_reason` "abort". An unknown id is ignored."""
        key = self._mailboxes.key_of(request_id)
        if key is not None:
            self._channel.send(Abort(key))

    # ---- calls ------------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, int | float | str]:
        """See `Engine.stats`."""
        return await self._call(GetStats)

    async def metrics(self) -> Figures:
        """See `Engine.figures`."""
        return await self._call(GetFigures)

    async def check_health(self) -> None:
        """Return when the loop has taken its next turn; EngineDeadError if it has ended."""
        await self._call(GetStats)

    async def died(self) -> EngineDeadError:
        """Return when the engine has ended, for whatever reason, with what those who waited were told."""
        mailbox = None
        try:
            mailbox = self._mailboxes.open(None)
            return await mailbox.take()
        except EngineDeadError as error:
            return error
        finally:
            if mailbox is not None:
                self._mailboxes.forget(mailbox)

    async def check_integrity(self) -> None:
        """See `Engine.check_integrity`; an engine that fails it ends."""
        await self._call(CheckIntegrity)

    @no_type_check
    async def update_params(
        self, params: Any, *, running: str = "recompute", version: int | None = None, copy: bool = True
    ) -> int:
        """See `Engine.update_params`; happens between two steps. Returns the new version of the weights.

        The caller's arrays must stay as they are until this returns. To another process they go as NumPy arrays.
        """
        if self._run_in == "process":
            params = await asyncio.to_thread(_on_host, params)
        return await self._call(lambda key: UpdateParams(key, params, running, version, copy))

    async def _call(self, message: Callable[[int], Message]) -> Any:
        mailbox = self._mailboxes.open(None)
        try:
            self._channel.send(message(mailbox.key))
            return await mailbox.take()
        finally:
            self._mailboxes.forget(mailbox)

    # ---- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the engine after the step that runs and give back its memory. Closing twice is fine.

        Whoever still waits gets an EngineDeadError. In an event loop, `async with` does this without blocking it.
        """
        self._close()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_) -> None:
        await asyncio.to_thread(self.close)


class _Mailbox:
    """Where one request's outputs, or one call's answer, wait to be fetched. Used in its own event loop only."""

    def __init__(self, key: int, request_id: str | None):
        self.key, self.request_id = key, request_id
        self.loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._content: Any = None
        self._error: Exception | None = None
        self._prompt: tuple[str | None, list[int]] | None = None

    def put(self, content: Any) -> None:
        if isinstance(content, RequestOutput):
            content = self._merged(content)
        self._content = content
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._arrived.set()

    async def take(self) -> Any:
        """What has arrived since the last time; waits for it. What came before an error is handed out first."""
        await self._arrived.wait()
        if self._content is None and self._error is not None:
            raise self._error
        content, self._content = self._content, None
        if self._error is None:
            self._arrived.clear()
        return content

    def _merged(self, output: RequestOutput) -> RequestOutput:
        if self._prompt is None:
            self._prompt = output.prompt, output.prompt_token_ids
        output.request_id = self.request_id or str(self.key)
        output.prompt, output.prompt_token_ids = self._prompt
        if self._content is None:
            return output
        self._content.extend(output)
        return self._content


class _Mailboxes:
    """All open mailboxes, and whether the engine lives. Thread-safe: tasks open and close, the channel delivers."""

    def __init__(self, on_compiled: CompileProgress):
        self._on_compiled = on_compiled
        self.input_processor: InputProcessor | None = None
        self._lock = threading.Lock()
        self._keys = itertools.count()
        self._open: dict[int, _Mailbox] = {}
        self._by_id: dict[str, int] = {}
        self._dead: Died | None = None
        self._begun = threading.Event()

    def wait_for_start(self) -> None:
        self._begun.wait()
        if self._dead is not None:
            raise ValueError(self._dead.error) if self._dead.refused else _dead_error(self._dead)

    @no_type_check
    def open(self, request_id: str | None) -> _Mailbox:
        """A new mailbox for this event loop. ValueError for an id that is taken or no string, EngineDeadError."""
        with self._lock:
            if self._dead is not None:
                raise _dead_error(self._dead)
            if request_id is not None:
                valid = isinstance(request_id, str) and request_id not in self._by_id
                require(valid, "request_id", request_id, "a string that no running request has")
            mailbox = _Mailbox(next(self._keys), request_id)
            self._open[mailbox.key] = mailbox
            if request_id is not None:
                self._by_id[request_id] = mailbox.key
            return mailbox

    def forget(self, mailbox: _Mailbox) -> bool:
        """Whether it was still open, so that the engine has to be told."""
        with self._lock:
            return self._close(mailbox.key) is not None and self._dead is None

    def key_of(self, request_id: str) -> int | None:
        with self._lock:
            return self._by_id.get(request_id)

    def deliver(self, replies: Sequence[Reply]) -> None:
        """Hand a batch to the mailboxes: one call into each event loop that has any of them."""
        batches: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        with self._lock:
            for reply in replies:
                for mailbox, act in self._sorted(reply):
                    batches.setdefault(mailbox.loop, []).append(act)
        for loop, actions in batches.items():
            try:
                loop.call_soon_threadsafe(_do_all, actions)
            except RuntimeError:  # that event loop is closed, and whoever waited there is gone
                continue
        if any(isinstance(reply, Started | Died) for reply in replies):
            self._begun.set()

    def _sorted(self, reply: Reply) -> list[tuple[_Mailbox, Callable[[], None]]]:
        match reply:
            case Outputs(outputs):
                pairs = [
                    (self._close(key) if output.finished else self._open.get(key), output) for key, output in outputs
                ]
                return [(box, lambda box=box, output=output: box.put(output)) for box, output in pairs if box]
            case Answer(key, value):
                box = self._close(key)
                return [(box, lambda: box.put(value))] if box else []
            case Refused(key, error):
                box = self._close(key)
                return [(box, lambda: box.fail(ValueError(error)))] if box else []
            case Started(input_processor):
                self.input_processor = input_processor
            case Compiled(done, total, name):
                self._on_compiled(done, total, name)
            case Died():
                self._dead = reply
                boxes = [self._close(key) for key in list(self._open)]
                return [(box, lambda box=box: box.fail(_dead_error(reply))) for box in boxes]
        return []

    def _close(self, key: int) -> _Mailbox | None:
        mailbox = self._open.pop(key, None)
        if mailbox is not None and mailbox.request_id is not None:
            del self._by_id[mailbox.request_id]
        return mailbox


def _do_all(actions: list[Callable[[], None]]) -> None:
    for act in actions:
        act()


def _dead_error(died: Died) -> EngineDeadError:
    error = EngineDeadError(died.error)
    if died.trace:
        error.add_note(died.trace)
    return error


def _new_engine(config: EngineConfig, progress: CompileProgress) -> "Engine":
    from jaxserve.engine import Engine  # in the engine's thread: it takes a second to import

    return Engine(config, progress=progress)


def _snapshot(prompt: Any) -> Any:
    """The prompt as it is now: the engine reads it later, when the caller may have changed it."""
    if isinstance(prompt, dict):
        return {key: _snapshot(value) for key, value in prompt.items()}
    return prompt.copy() if hasattr(prompt, "copy") else prompt


def _on_host(params: Any) -> dict:
    from jaxserve.weights_update import host_parameters

    return host_parameters(params)
