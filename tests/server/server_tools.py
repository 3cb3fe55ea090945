"""What the tests of the server share: servers in this process over tiny engines, and server processes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
from checkpoint_tools import CHAT_TEMPLATE, byte_tokenizer
from engine_tools import tiny_engine

from jaxserve import AsyncEngine, EngineConfig
from jaxserve.server import run
from jaxserve.server.config import ServerConfig
from jaxserve.server.service import Service

VOCAB = 300
NAME = "tiny"


def byte_engine(**options):
    """A tiny engine whose tokens are bytes."""
    return tiny_engine("float32", text=byte_tokenizer(VOCAB), **options)


class LocalServer:
    """A server in a thread of this process, at a port of its own, over a given engine."""

    def __init__(self, engine, **options):
        self.engine = engine
        given = {"port": 0, "served_model_name": NAME, "chat_template": CHAT_TEMPLATE, **options}
        config = ServerConfig(**given)
        start = lambda progress: AsyncEngine(engine=engine, on_compiled=progress)
        self.service = Service(config, EngineConfig(max_num_seqs=engine.config.max_num_seqs), start)
        self._socket = run.listen(config)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = run.Server(self.service)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        self.client = httpx.Client(base_url=self.url, timeout=60)
        await_ready(self.client)

    def post(self, path, body, **options):
        return self.client.post(path, json=body, **options)

    def stats(self):
        return metrics(self.client)

    def idle(self, seconds=20):
        """Wait until nothing runs any more, and check that nothing is lost."""
        until = time.monotonic() + seconds
        while self.engine.has_unfinished() or self.service.num_open or self.service.tasks:
            assert time.monotonic() < until, "requests are left"
            time.sleep(0.005)
        assert self.engine.scheduler.pool.num_free == self.engine.scheduler.pool.num_pages
        self.engine.check_integrity()

    def close(self, seconds=30):
        self.client.close()
        self.server.should_exit = True
        self._thread.join(seconds)
        assert not self._thread.is_alive()
        self._socket.close()


@contextmanager
def local_server(engine=None, **options):
    server = LocalServer(engine or byte_engine(), **options)
    try:
        yield server
    finally:
        server.close()


class ServerProcess:
    """`jaxserve serve` in a process of its own."""

    def __init__(self, *arguments, ready=True):
        command = [sys.executable, "-m", "jaxserve.cli", "serve", "--port", "0", *map(str, arguments)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines = []
        self.url = None
        self._bound = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._bound.wait(60), self.log
        self.client = httpx.Client(base_url=self.url, timeout=300)
        if ready:
            await_ready(self.client, 300)

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"listening at (http://\S+)", line):
                self.url = found[1].rstrip('"},')
                self._bound.set()
        self._bound.set()

    @property
    def log(self):
        return "".join(self.lines)

    def signal(self, number=signal.SIGTERM):
        os.kill(self.process.pid, number)

    def wait(self, seconds=60):
        """The exit status."""
        status = self.process.wait(seconds)
        self._reader.join(10)
        return status

    def close(self):
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        self.process.stderr.close()


def await_ready(client, seconds=60):
    until = time.monotonic() + seconds
    while (answer := client.get("/ready")).status_code != 200:
        assert answer.json()["status"] in ("loading", "compiling"), answer.text
        assert time.monotonic() < until, answer.text
        time.sleep(0.02)


def events(response):
    """The events of a stream that has ended well, without its last line."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def joined(chunks):
    """The choices of a streamed answer, put together: each with exactly one finish reason, which comes last."""
    choices = {}
    for chunk in chunks:
        for new in chunk["choices"]:
            text = new["delta"].get("content", "") if "delta" in new else new["text"]
            empty = {"text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
            whole = choices.setdefault(new["index"], empty)
            assert whole["finish_reason"] is None, "something comes after the end"
            whole["text"] += text
            whole["finish_reason"], whole["stop_reason"] = new["finish_reason"], new["stop_reason"]
            if new["logprobs"] is not None:
                before = whole["logprobs"] or {}
                whole["logprobs"] = {
                    name: (before.get(name) or []) + values if values is not None else None
                    for name, values in new["logprobs"].items()
                }
    assert all(choice["finish_reason"] for choice in choices.values())
    return choices


def whole(answer):
    """The choices of an answer in the same form as `joined`."""
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            **{name: choice[name] for name in ("logprobs", "finish_reason", "stop_reason")},
        }
        for choice in answer["choices"]
    }


def metrics(client):
    """{name with labels: value} of /metrics, without the labels that all have."""
    found = {}
    for line in client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r'(engine|model_name)="[^"]*",?', "", name).replace("{}", "").replace(",}", "}")
            found[name] = float(value)
    return found
