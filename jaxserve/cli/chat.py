"""`jaxserve chat`: a conversation, streamed. Each turn sends the whole history, and the prefix cache knows most of it.

Answers go to stdout and all else to stderr, so a conversation can be scripted through pipes.
"""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from jaxserve.cli.options import add_shared_options, engine_config, load, sampling_params
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM

OWN = ("system", "chat_template", "chat_template_kwargs")
COMMANDS = (
    "/reset forgets the conversation, /stats tells about the last turn, /exit or Ctrl-D ends; Ctrl-C stops an answer"
)


def add_options(parser: ArgumentParser) -> None:
    add_shared_options(parser, sampling__max_tokens=None)
    parser.add_argument("--system", type=str, help="the system message")
    parser.add_argument("--chat_template", type=str, help="a chat template, or a file that holds one")
    parser.add_argument("--chat_template_kwargs", type=dict, help="what else the template takes")


def run(options: Namespace) -> int:
    config = engine_config(options)
    if (n := sampling_params(options).n) != 1:
        raise ValueError(f"n={n}: a chat has one answer: n must be 1")
    template = options.chat_template
    if template is not None and "{" not in template:
        template = Path(template).read_text(encoding="utf-8")
    rendering = {"chat_template": template, "chat_template_kwargs": options.chat_template_kwargs}
    with load(config) as llm:
        params = sampling_params(options, llm.engine.default_sampling_params)
        chat = Chat(llm, params, system=options.system, rendering=rendering)
        chat.check_template()
        print(f"{llm.engine.memory_plan}\n{COMMANDS}", file=sys.stderr)
        while (line := _read_line()) is not None:
            if not chat.take(line):
                break
    return 0


class Chat:
    """The history of a conversation and what is done with each line of it."""

    def __init__(self, llm: "LLM", params: SamplingParams, *, system: str | None, rendering: dict[str, Any]):
        self._llm, self._params, self._rendering = llm, params, rendering
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self._history: list[dict[str, str]] = []
        self._last_turn = "nothing was said yet"

    def check_template(self) -> None:
        """Find out before the first line whether there is a template; ValueError if there is none."""
        self._llm.chat_template.render([*self._system, {"role": "user", "content": "Hello"}], **self._rendering)

    def take(self, line: str) -> bool:
        """Do what a line says; False if it ends the conversation."""
        match line.strip():
            case "":
                pass
            case "/exit":
                return False
            case "/reset":
                self._history.clear()
                _note("the conversation is forgotten")
            case "/stats":
                _note(self._last_turn)
            case command if command.startswith("/") and command[1:].isalpha():
                _note(f"there is no {command}: {COMMANDS}")
            case _:
                self._say(line)
        return True

    def _say(self, message: str) -> None:
        self._history.append({"role": "user", "content": message})
        try:
            answer = self._answer()
        except ValueError as error:  # the context is full, or the template refuses the message
            _note(f"{error} (/reset forgets the conversation)")
            answer = ""
        if answer:
            self._history.append({"role": "assistant", "content": answer})
        else:
            self._history.pop()

    def _answer(self) -> str:
        """Stream the answer; returns what was said until its end or Ctrl-C."""
        prompt = self._llm.chat_template.prompt([*self._system, *self._history], **self._rendering)
        started, text, tokens, ending = time.perf_counter(), "", 0, None
        with contextlib.closing(self._llm.stream(prompt, self._params)) as stream, _interruptible() as interrupted:
            for delta in stream:
                [output] = delta.outputs
                text, tokens, ending = text + output.text, tokens + len(output.token_ids), output.finish_reason
                print(output.text, end="", flush=True)
                if output.error is not None:
                    _note(output.error)
                if interrupted.is_set():
                    ending = ending or "stopped by Ctrl-C"
                    break
        print(flush=True)
        if ending not in ("stop", None):
            _note(f"[{ending}]")
        rate = tokens / (time.perf_counter() - started)
        self._last_turn = (
            f"{len(delta.prompt_token_ids)} prompt tokens, {delta.num_cached_tokens} of them from the prefix cache; "
            f"{tokens} output tokens, {rate:.1f} tokens/s"
        )
        return text


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of breaking into the engine's step; the second one ends the program."""
    interrupted = threading.Event()

    def handle(number, frame) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _read_line() -> str | None:
    """The next line, or None at the end of the input. On a terminal with a prompt and line editing."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):  # absent on some systems
            import readline  # noqa: F401
    while True:
        try:
            return input("\n> " if terminal else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            _note("\n/exit or Ctrl-D ends")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
