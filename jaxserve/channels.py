"""Where the engine's loop runs, and how batches get there and back: a thread, or a process of its own.

Both have `send(message)` for the front, from any thread, which never waits for the engine, and call `deliver(replies)`
with each batch, from a thread of their own. After a batch that ends with `Died` nothing follows.
"""

import contextlib
import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue

from jaxserve.config import EngineConfig
from jaxserve.messages import Close, Died, Message, Reply, Unreadable

Deliver = Callable[[list[Reply]], None]
_STACK_BYTES = 64 * 2**20  # for XLA's recursion, as in runner/compilation.py
_LAST_STEP_SECONDS = 60  # what a process gets to finish its step when it is closed


def _drain(queue: SimpleQueue, wait: bool) -> list:
    """Everything in the queue; at least one item with `wait`."""
    items = [queue.get()] if wait else []
    with contextlib.suppress(Empty):
        while True:
            items.append(queue.get_nowait())
    return items


def _start_thread(target: Callable, *args, stack: int = 0) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="jaxserve-engine", daemon=True)
    previous = threading.stack_size(stack)
    try:
        thread.start()
    finally:
        threading.stack_size(previous)
    return thread


class ThreadChannel:
    """The engine in a thread of this process. `make_engine` runs in it, too."""

    def __init__(self, make_engine: Callable, deliver: Deliver):
        from jaxserve.engine_loop import serve  # JAX is needed where the engine runs, no earlier

        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._thread = _start_thread(serve, make_engine, _ThreadEnd(self._inbox, deliver), stack=_STACK_BYTES)

    def send(self, message: Message) -> None:
        self._inbox.put(message)

    def close(self) -> None:
        """End the loop and wait for it. Closing twice is fine."""
        self._inbox.put(Close())
        if threading.current_thread() is not self._thread:  # the garbage collector may call from anywhere
            self._thread.join()


class _ThreadEnd:
    def __init__(self, inbox: SimpleQueue, deliver: Deliver):
        self._inbox, self.send = inbox, deliver

    def receive(self, wait: bool) -> list[Message]:
        return _drain(self._inbox, wait)


class ProcessChannel:
    """The engine in a spawned process. Messages are pickled by the caller, whose errors they are.

    A thread writes to the pipe and another reads from it: a full pipe blocks neither the caller nor the engine.
    """

    def __init__(self, config: EngineConfig, deliver: Deliver):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run_process, args=(config, theirs), name="jaxserve-engine", daemon=True)
        self._process.start()
        theirs.close()
        self._outbox: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._writer, self._reader = _start_thread(self._write), _start_thread(self._read, deliver)

    def send(self, message: Message) -> None:
        """ValueError for what cannot be pickled."""
        try:
            frame = pickle.dumps(message)
        except Exception as error:  # objects of the caller's may raise anything
            raise ValueError(f"{type(message).__name__} cannot be sent to another process: {error}") from error
        self._outbox.put((getattr(message, "key", -1), frame))

    def close(self) -> None:
        """End the process and wait for it: it is stopped by force if its step takes too long. Twice is fine."""
        with self._closing:
            if self._pipe.closed:
                return
            self.send(Close())
            if threading.current_thread() is not self._reader:
                self._reader.join(_LAST_STEP_SECONDS)
                if self._reader.is_alive():
                    self._process.kill()
                    self._reader.join()
            self._outbox.put(None)
            self._writer.join()
            self._pipe.close()
            self._process.close()

    def _write(self) -> None:
        while True:
            frames = _drain(self._outbox, wait=True)
            open_end = frames[-1] is not None
            with contextlib.suppress(OSError):  # the process has ended: the reader tells everyone
                self._pipe.send([frame for frame in frames if frame is not None])
            if not open_end:
                return

    def _read(self, deliver: Deliver) -> None:
        told, cause = False, ""
        try:
            while True:
                replies = self._pipe.recv()
                told = isinstance(replies[-1], Died)
                deliver(replies)
        except (EOFError, OSError):
            pass
        except Exception as error:  # whatever it is: nobody shall wait for what cannot be delivered
            cause = f" after its replies could not be delivered ({type(error).__name__}: {error})"
            self._process.kill()
        self._process.join()
        if not told:
            deliver([Died(f"the engine's process has ended with exit code {self._process.exitcode}{cause}")])


class _ProcessEnd:
    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self.send = pipe.send

    def receive(self, wait: bool) -> list[Message]:
        messages = [_rebuilt(*frame) for frame in self._pipe.recv()] if wait or self._pipe.poll() else []
        while self._pipe.poll():
            messages += [_rebuilt(*frame) for frame in self._pipe.recv()]
        return messages


def _rebuilt(key: int, frame: bytes) -> Message:
    try:
        return pickle.loads(frame)
    except Exception as error:  # of a class that this process cannot import, say
        return Unreadable(key, f"{type(error).__name__} in the engine's process: {error}")


def _run_process(config: EngineConfig, pipe: Connection) -> None:
    """The body of the engine's process; it ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    from jaxserve.engine import Engine
    from jaxserve.engine_loop import serve

    with pipe, contextlib.suppress(OSError):  # nobody is left to be told
        serve(lambda progress: Engine(config, progress=progress), _ProcessEnd(pipe))
