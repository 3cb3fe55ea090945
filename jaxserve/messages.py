"""What goes between an asynchronous front and the engine's loop: plain, picklable batches. A leaf: knows no engine.

The front sends lists of `Message`, the loop answers with lists of `Reply`. `key` is the front's own number: of a
request, or of a call that wants an answer. A request ends with its last output, with `Refused`, or with the engine.
"""

from dataclasses import dataclass
from typing import Any

from jaxserve.outputs import RequestOutput


class EngineDeadError(RuntimeError):
    """The engine's loop has ended, by an error or by `close`: nothing that it owed will come."""


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Start a request: what the user gave, right or wrong; see `Engine.add_request`."""

    key: int
    prompt: Any
    params: Any = None
    arrival_time: float | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request; one that is unknown or finished is ignored."""

    key: int


@dataclass(frozen=True, slots=True)
class GetStats:
    """Answered with `Engine.stats()`."""

    key: int


@dataclass(frozen=True, slots=True)
class GetFigures:
    """Answered with `Engine.figures()`."""

    key: int


@dataclass(frozen=True, slots=True)
class CheckIntegrity:
    """Answered with None; for tests."""

    key: int


@dataclass(frozen=True, slots=True)
class UpdateParams:
    """See `Engine.update_params`; answered with the version. To another process `params` go as NumPy arrays."""

    key: int
    params: Any
    running: Any = "recompute"
    version: Any = None
    copy: bool = True


@dataclass(frozen=True, slots=True)
class Close:
    """End the loop, whatever is running."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a message that could not be rebuilt in the engine's process."""

    key: int
    error: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """The engine is being started: `done` of `total` programs are compiled, the last one is `name`."""

    done: int
    total: int
    name: str


@dataclass(frozen=True, slots=True)
class Started:
    """The engine is there, and takes what its `InputProcessor` lets through."""

    input_processor: Any


@dataclass(frozen=True, slots=True)
class Outputs:
    """What one step added, by key. Prompt and its ids come with the first output of a request only."""

    outputs: list[tuple[int, RequestOutput]]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call."""

    key: int
    value: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """The request or call was wrong (ValueError); nothing has changed."""

    key: int
    error: str


@dataclass(frozen=True, slots=True)
class Died:
    """The loop has ended. `refused`: the options were wrong, and it has never begun. `trace` is for people."""

    error: str
    trace: str = ""
    refused: bool = False


Message = AddRequest | Abort | GetStats | GetFigures | CheckIntegrity | UpdateParams | Close | Unreadable
Reply = Compiled | Started | Outputs | Answer | Refused | Died
