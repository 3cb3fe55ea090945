"""`jaxserve bench serve` and the soak against servers in this process, and the figures against their definitions."""

import asyncio
import json
import math
import xml.etree.ElementTree as xml

import numpy as np
import pytest
from checkpoint_tools import SHAPES, write_tiny_checkpoint
from cli_tools import refused
from cli_tools import run as command
from server_tools import NAME, ServerProcess, byte_engine, local_server

from jaxserve.bench.client import Client, Outcome
from jaxserve.bench.serving import Load, ServingReport, drive, parse_limits
from jaxserve.bench.soak import soak
from jaxserve.bench.workload import Item

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{46 + at:02d}.6805900,{prompt},{output}\n"
    for at, prompt, output in ((0, 9, 4), (2, 30, 7), (3, 5, 3))
)


def outcome(started, *events, tokens=None, error=None):
    ended = events[-1] if events else started
    return Outcome(started, 10, tokens or len(events), 0, list(events), ended, 200, "x", "stop", error)


def test_the_figures_are_those_of_their_definitions():
    outcomes = [
        outcome(0.0, 0.5, 0.7, 1.0),
        outcome(1.0, 1.1, 1.2, tokens=5),
        outcome(2.0, error="no"),
        outcome(2.0, 4.0),
    ]
    report = ServingReport.of("x", outcomes, {"ttft": 600.0, "tpot": 100.0})
    assert report.series["TTFT"] == pytest.approx([500, 100, 2000])
    assert report.series["TPOT"] == pytest.approx([250, 25])
    assert report.series["ITL"] == pytest.approx([200, 300, 100])
    assert report.series["E2E"] == pytest.approx([1000, 200, 2000])
    assert (report.requests, report.failed, report.seconds, report.errors) == (3, 1, 4.0, {"no": 1})
    assert report.output_tokens == 3 + 5 + 1
    assert report.goodput == 1 / 4  # the second only: the first is too slow per token, the last at its first
    assert report.percentiles("TTFT")["p90"] == pytest.approx(np.percentile([500, 100, 2000], 90))
    assert report.most_at_once == 1


def test_poisson_arrivals():
    times = np.array(Load.poisson(20_000, 4.0, seed=1).times)
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)  # exponential: the deviation is the mean
    assert Load.poisson(5, math.inf).times is None


def test_arrivals_of_a_trace(tmp_path):
    (tmp_path / "t.csv").write_text(TRACE)
    assert Load.trace(tmp_path / "t.csv", 9, speed=2.0).times == [0, 1, 1.5]
    (tmp_path / "t.csv").write_text("ContextTokens\n1\n")
    with pytest.raises(ValueError, match="TIMESTAMP"):
        Load.trace(tmp_path / "t.csv", 9)


def test_limits_of_goodput():
    assert parse_limits("ttft:500, tpot:50") == {"ttft": 500, "tpot": 50}
    for wrong in ("ttft", "ttft:x", "ttft:0", "itl:3"):
        with pytest.raises(ValueError, match="goodput"):
            parse_limits(wrong)


def test_requests_come_when_they_should_and_not_too_many_at_once():
    body = {
        "prompt": "x",
        "max_tokens": 20,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with local_server() as server:
        client = Client(server.url, "/v1/completions")
        times = [0.0, 0.3, 0.35, 0.6]
        outcomes = asyncio.run(drive(client, [body] * 4, Load(times)))
        assert [o.started for o in outcomes] == pytest.approx(times, abs=0.1)
        assert {(o.error, o.output_tokens, o.status, o.finish_reason) for o in outcomes} == {(None, 20, 200, "length")}
        assert {len(o.events) for o in outcomes} <= set(range(1, 21))
        outcomes = asyncio.run(drive(client, [body] * 9, Load(concurrency=3)))
        assert ServingReport.of("x", outcomes).most_at_once <= 3
        wrong = asyncio.run(drive(client, [{**body, "n": 0}], Load()))[0]
        assert (wrong.status, wrong.error.startswith("status 400: ")) == (400, True)


def test_the_command_prints_and_writes(capsys, tmp_path):
    (tmp_path / "t.csv").write_text(TRACE)
    files = ["--output-json", tmp_path / "r.json", "--output-html", tmp_path / "r.html"]
    with local_server() as server:
        common = ["bench", "serve", "--base-url", server.url, "--model", NAME, "--vocab-size", "300"]
        status, out, err = command(capsys, *common, "--trace", tmp_path / "t.csv", "--goodput", "e2el:60000", *files)
        assert (status, err) == (0, "")
        assert "3 requests (0 failed)" in out
        assert [line.split()[0] for line in out.splitlines()[-4:]] == ["TTFT", "TPOT", "ITL", "E2E"]
        chat = tmp_path / "chat.jsonl"
        chat.write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"prompt": "b"}\n')
        arguments = ["--dataset", chat, "--endpoint", "chat", "--output-len", 5, "--request-rate", 20]
        assert command(capsys, *common, *arguments)[0] == 0
    [result] = json.loads((tmp_path / "r.json").read_text())["results"]
    assert (result["prompt_tokens"], result["output_tokens"]) == (44, 14)
    assert result["goodput"] == pytest.approx(3 / result["seconds"])
    assert result["ttft_ms"]["p50"] > 0
    page = (tmp_path / "r.html").read_text()
    for drawing in page.split("<svg")[1:]:
        xml.fromstring("<svg" + drawing.split("</svg>")[0] + "</svg>")
    assert page.count("<svg") == 4


def test_wrong_options_are_refused(capsys):
    for arguments, parts in (
        (["--base-url", "ftp://x"], ["base_url", "http"]),
        (["--request-rate", "0"], ["request_rate", "above 0"]),
        (["--goodput", "speed:3"], ["goodput", "ttft"]),
        (["--arrivals", "trace"], ["arrivals", "trace"]),
        (["--endpoint", "chat"], ["endpoint", "random tokens"]),
        (["--base-url", "127.0.0.1:1"], ["base_url", "Connection"]),
    ):
        refused(capsys, "bench", "serve", *arguments, parts=parts, status=1)


def work(count):
    source = np.random.default_rng(1)
    lengths = zip(source.integers(2, 20, count), source.integers(20, 100, count), strict=True)
    return [(0.02 * at, Item(source.integers(8, 120, p).tolist(), int(o))) for at, (p, o) in enumerate(lengths)]


def soaked(folder, seconds):
    """A server process with a pool that is too small for its clients."""
    model = write_tiny_checkpoint(folder / "model")
    shapes = {"model": model, **SHAPES, "num_pages": 20}
    server = ServerProcess(*(part for name, value in shapes.items() for part in (f"--{name}", value)))
    try:
        report = asyncio.run(soak(server.url, work(1000), seconds=seconds, clients=32, probe_every=1.0))
        server.signal()
        assert server.wait() == 0  # its books are right
    finally:
        server.close()
    assert "Traceback" not in server.log
    return report


def test_a_short_soak(tmp_path):
    report = soaked(tmp_path, 5.0)
    assert report.problems == []
    assert report.left > 0
    assert report.preemptions > 0
    assert report.probes >= 2


@pytest.mark.slow
def test_a_soak_of_a_minute(tmp_path):
    report = soaked(tmp_path, 60.0)
    assert report.problems == []
    assert report.left > 20
    assert report.preemptions > 20


def test_a_soak_sees_what_is_wrong():
    """Answers that change, and answers that are cut short."""
    engine = byte_engine(num_pages=64, max_model_len=128)
    step, shift = engine.step, [0]

    def wrong():
        outputs = step()
        shift[0] += 1
        for output in outputs:
            for new in output.outputs:
                new.text = chr(65 + shift[0] % 26) * len(new.text)
        return outputs

    engine.step = wrong
    with local_server(engine) as server:
        report = asyncio.run(soak(server.url, work(50), seconds=4.0, clients=4, probe_every=0.5))
    assert any("the probe's answer has changed" in problem for problem in report.problems)
