"""`jaxserve serve` as a process: its start, its ends and its log."""

import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from checkpoint_tools import SHAPES, write_tiny_checkpoint
from cli_tools import refused
from server_tools import ServerProcess, events, metrics

from jaxserve import EngineConfig, SamplingParams
from jaxserve.cli import main
from jaxserve.server.config import ServerConfig
from jaxserve.server.protocol import WITHOUT_EFFECT

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "Hello", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("serve") / "model")
    return [part for name, value in {"model": folder, **SHAPES}.items() for part in (f"--{name}", str(value))]


@pytest.fixture
def start(options):
    started = []

    def starting(*more, **how):
        started.append(ServerProcess(*options, *more, **how))
        return started[-1]

    yield starting
    for server in started:
        server.close()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_request_ends_after_the_first_signal_and_the_log_tells_of_it(start):
    server = start("--log-format", "json")
    assert server.client.post(COMPLETIONS, json=SHORT, headers={"X-Request-Id": "a1"}).status_code == 200
    assert server.client.post(COMPLETIONS, json={**SHORT, "temperature": "x"}).status_code == 400
    assert metrics(server.client)["jaxserve:compilations_after_warmup_total"] == 0
    with server.client.stream("POST", COMPLETIONS, json={**SHORT, "max_tokens": 100, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        server.signal()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.wait() == 0
    lines = [json.loads(line) for line in server.lines if line.startswith("{")]
    told = [line for line in lines if line["message"] == "request"]
    assert [line["status"] for line in told] == [200, 400, 200]
    first = {"request_id": "a1", "path": COMPLETIONS, "prompts": 1, "prompt_tokens": 5, "completion_tokens": 8}
    first |= {"cached_tokens": 0, "finish_reason": "length"}
    assert {name: told[0][name] for name in first} == first
    assert 0 < told[0]["ttft_ms"] <= told[0]["total_ms"]
    assert "temperature" in told[1]["error"]
    assert "Hello" not in server.log
    assert "Traceback" not in server.log


def test_a_second_signal_ends_it_at_once(start):
    server = start("--shutdown-timeout", "100")
    body = {**SHORT, "max_tokens": 120, "n": 8, "temperature": 1}
    hold = threading.Event()

    def keep_busy():
        while not hold.is_set():
            try:
                httpx.post(server.url + COMPLETIONS, json=body, timeout=60)
            except httpx.HTTPError:
                return

    busy = [threading.Thread(target=keep_busy) for _ in range(4)]
    for thread in busy:
        thread.start()
    silent = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n"
    silent.sendall(head)  # a request that is not there yet holds the server up
    time.sleep(0.3)
    server.signal()
    time.sleep(1)
    assert server.process.poll() is None
    begun = time.monotonic()
    server.signal()
    assert server.wait(10) == 128 + signal.SIGTERM
    assert time.monotonic() - begun < 2
    hold.set()
    for thread in busy:
        thread.join()
    silent.close()


def test_the_port_is_there_before_the_model_and_a_signal_ends_the_loading(start):
    server = start(ready=False)
    first = server.client.get("/ready")
    assert (first.status_code, first.json()["status"]) == (503, "loading")
    assert server.client.get("/health").status_code == 200
    assert "process_resident_memory_bytes" in metrics(server.client)
    response = server.client.post(COMPLETIONS, json=SHORT)
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert server.client.get("/v1/models").status_code == 503
    begun = time.monotonic()
    server.signal(signal.SIGINT)
    assert server.wait(20) == 0
    assert time.monotonic() - begun < 10


def test_a_model_that_cannot_be_loaded_ends_it(start):
    server = start("--model", "/nowhere", ready=False)
    assert server.wait() == 1
    assert "the engine could not be started" in server.log
    assert "/nowhere" in server.log
    assert "Traceback" not in server.log


def test_the_engine_in_a_process_of_its_own_and_its_death(start):
    server = start("--run-in", "process")
    whole = server.client.post(COMPLETIONS, json=SHORT).json()["choices"][0]["text"]
    streamed = events(server.client.post(COMPLETIONS, json={**SHORT, "stream": True}))
    assert "".join(event["choices"][0]["text"] for event in streamed) == whole
    told = []

    def ask():
        told.append(httpx.post(server.url + COMPLETIONS, json={**SHORT, "n": 8, "max_tokens": 120}, timeout=60))

    asking = threading.Thread(target=ask)
    [engine] = [child for child in children(server.process.pid) if "spawn_main" in command_line(child)]
    os.kill(engine, signal.SIGSTOP)  # so that the request is there when it dies
    asking.start()
    time.sleep(0.5)
    os.kill(engine, signal.SIGKILL)
    asking.join()
    assert told[0].status_code == 500
    assert "exit code -9" in told[0].json()["error"]["message"]
    assert server.client.get("/health").status_code == 503
    assert server.wait(20) == 1


def command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_wrong_options_cost_no_time(capsys):
    for arguments, parts in (
        (["--port", "70000"], ["port", "65536"]),
        (["--request-timeout", "-1"], ["request_timeout"]),
        (["--log-format", "xml"], ["log_format"]),
        (["--max-num-seqs", "0"], ["max_num_seqs"]),
    ):
        refused(capsys, "serve", *arguments, parts=parts, status=1)
    refused(capsys, "serve", "--prot", "80", parts=["prot", "did you mean 'port'"])


def test_a_port_that_is_taken(options):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "jaxserve.cli", "serve", *options, "--port", str(port)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert f"port={port}: cannot listen at 127.0.0.1" in result.stderr


GUIDE = Path(__file__).parent.parent.parent / "docs" / "SERVER.md"


def test_the_commands_of_the_guide_parse(monkeypatch):
    """They are stopped where they would start or load something."""
    monkeypatch.setattr("jaxserve.server.run.serve", lambda service: 0)
    monkeypatch.setattr("jaxserve.cli.bench_serve.run", lambda options: 0)
    monkeypatch.setattr("jaxserve.cli.bench_soak.run", lambda options: 0)
    monkeypatch.setattr("jaxserve.server.logs.configure", lambda log_format: None)
    commands = re.findall(r"^\.venv/bin/jaxserve (.*)$", GUIDE.read_text(), re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        arguments = shlex.split(command)
        assert main(arguments) == 0, command


def test_the_guide_names_options_and_fields_that_exist():
    known = {f.name for cls in (ServerConfig, EngineConfig, SamplingParams) for f in dataclasses.fields(cls)}
    flags = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)", GUIDE.read_text())}
    assert flags - known <= {"config", "output_html"}
    section = GUIDE.read_text().partition("Accepted without effect:")[2].partition("Null is")[0]
    assert set(re.findall(r"`([a-z_]+)`", section)) == set(WITHOUT_EFFECT)
