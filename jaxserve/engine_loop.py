"""The engine behind a channel: batches of messages in, one step, a batch of replies out. Knows no threads.

A ValueError belongs to the message that caused it. Any other error is the engine's end: everyone who waits is told.
"""

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from jaxserve.engine import Engine
from jaxserve.messages import (
    Abort,
    AddRequest,
    Answer,
    CheckIntegrity,
    Close,
    Compiled,
    Died,
    GetFigures,
    GetStats,
    Message,
    Outputs,
    Refused,
    Reply,
    Started,
    Unreadable,
    UpdateParams,
)
from jaxserve.progress import CompileProgress

_log = logging.getLogger("jaxserve")


@runtime_checkable
class LoopEnd(Protocol):
    """The loop's end of a channel."""

    def receive(self, wait: bool) -> list[Message]:
        """What has arrived; `wait` sleeps until there is something. EOFError if the front is gone."""

    def send(self, replies: list[Reply]) -> None:
        """Deliver a batch."""


class EngineLoop:
    """Takes turns: see `turn`."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.closed = False
        self._reported: set[str] = set()  # requests whose prompt the front has

    @property
    def busy(self) -> bool:
        """Whether a turn without messages has something to do."""
        return self.engine.has_unfinished()

    def turn(self, messages: Sequence[Message]) -> list[Reply]:
        """Take in messages, in order, then run one step if there is work."""
        replies = [reply for message in messages if (reply := self._take(message)) is not None]
        if not self.closed and self.busy:
            outputs = [(int(output.request_id), output) for output in self.engine.step()]
            for _, output in outputs:
                if output.request_id in self._reported:
                    output.prompt, output.prompt_token_ids = None, []
                self._reported.add(output.request_id)
                if output.finished:
                    self._reported.discard(output.request_id)
            if outputs:
                replies.append(Outputs(outputs))
        return replies

    def _take(self, message: Message) -> Reply | None:
        engine = self.engine
        try:
            match message:
                case AddRequest():
                    return self._add(message)
                case Abort(key):
                    engine.abort(str(key))
                case GetStats(key):
                    return Answer(key, engine.stats())
                case GetFigures(key):
                    return Answer(key, engine.figures())
                case CheckIntegrity(key):
                    return Answer(key, engine.check_integrity())
                case UpdateParams(key, params, running, version, copy):
                    engine.update_params(params, running=running, version=version, copy=copy)
                    return Answer(key, engine.weights_version)
                case Unreadable(key, error):
                    return Refused(key, error)
                case Close():
                    self.closed = True
        except ValueError as error:
            return Refused(message.key, str(error))
        return None

    def _add(self, new: AddRequest) -> Refused | None:
        try:
            self.engine.add_request(str(new.key), new.prompt, new.params, arrival_time=new.arrival_time)
        except Exception as error:  # a prompt may be any object, and its methods may raise anything
            return Refused(new.key, str(error) if isinstance(error, ValueError) else f"prompt: {_named(error)}")
        return None


def serve(make_engine: Callable[[CompileProgress], Engine], channel: LoopEnd) -> None:
    """Build the engine and run its loop until it is closed, the front is gone, or it fails."""
    engine = None
    try:
        engine = make_engine(lambda *progress: channel.send([Compiled(*progress)]))
        channel.send([Started(engine.input_processor)])
        loop = EngineLoop(engine)
        while not loop.closed:
            replies = loop.turn(channel.receive(wait=not loop.busy))
            if replies:
                channel.send(replies)
        last = Died("the engine is closed")
    except (EOFError, BrokenPipeError, ConnectionResetError):
        last = Died("the engine's channel is closed")
    except BaseException as error:
        wrong_options = engine is None and isinstance(error, ValueError | TypeError)
        if not wrong_options:
            _log.exception("the engine's loop has died")
        last = Died(str(error) if wrong_options else _named(error), traceback.format_exc(), wrong_options)
    if engine is not None:
        try:
            engine.close()
        except Exception:
            _log.exception("the engine could not be closed")
    channel.send([last])


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
