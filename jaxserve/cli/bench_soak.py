"""`jaxserve bench soak`: a server of its own under a long load of clients that come, and sometimes go."""

import asyncio
import csv
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jsonargparse import ArgumentParser, Namespace

from jaxserve.bench import workload
from jaxserve.bench.serving import Load
from jaxserve.cli.options import STRICT, add_shared_options
from jaxserve.validation import require

OWN = ("trace", "minutes", "clients", "leaving", "speed", "shrink", "vocab_size", "seed")
START_SECONDS = 900


def add_options(kinds: Any) -> None:
    description = (
        "Starts a server with these engine options and sends it a trace's requests, of which some are given up at a "
        "random moment. Ends with 1 if any answer was wrong or missing, if pages, memory or files are left, or if the "
        "engine's books are wrong at the end."
    )
    parser = ArgumentParser(description=description, **STRICT)
    kinds.add_subcommand("soak", parser, help="a server under a long load")
    add_shared_options(parser, sampling=False, engine__compile="warmup")
    add = parser.add_argument
    add("--trace", type=str, required=True, help="a CSV file: TIMESTAMP, ContextTokens, GeneratedTokens")
    add("--minutes", type=float, default=20.0, help="how long")
    add("--clients", type=int, default=64, help="requests under way at most")
    add("--leaving", type=float, default=0.1, help="the share of requests that are given up")
    add("--speed", type=float, default=1.0, help="how much faster than the trace requests arrive")
    add("--shrink", type=float, default=1.0, help="how much shorter than the trace's prompts and outputs are")
    add("--vocab_size", type=int, default=49152, help="random token ids are below it")
    add("--seed", type=int, default=0, help="of the random work")


def run(options: Namespace) -> int:
    from jaxserve.bench.soak import soak

    _check(options)
    work = scaled_trace(options.trace, options.speed, options.shrink, options.vocab_size, options.seed)
    with server(options.engine.as_dict()) as (process, url):
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            [card] = json.load(answer)["data"]
        items, cut = workload.fit([item for _, item in work], card["max_model_len"])
        print(f"{cut} of {len(items)} requests cut to max_model_len={card['max_model_len']}", flush=True)
        running = soak(
            url,
            [(at, item) for (at, _), item in zip(work, items, strict=True)],
            seconds=60 * options.minutes,
            clients=options.clients,
            leaving=options.leaving,
            seed=options.seed,
        )
        report = asyncio.run(running)
        process.terminate()
        if status := process.wait(60):
            report.problems.append(f"the server has ended with {status}")
    print(report)
    return 1 if report.problems else 0


def _check(options: Namespace) -> None:
    require(Path(options.trace).is_file(), "trace", options.trace, "an existing file")
    for name in ("minutes", "speed", "shrink"):
        require(options[name] > 0, name, options[name], "a number above 0")
    require(options.clients >= 1, "clients", options.clients, "an integer of at least 1")
    require(0 <= options.leaving <= 1, "leaving", options.leaving, "a number from 0 to 1")


def scaled_trace(
    file: str, speed: float, shrink: float, vocab_size: int, seed: int, count: int = 20_000
) -> list[tuple[float, workload.Item]]:
    """(seconds after the start, request) of a trace, faster and shorter."""
    times = Load.trace(file, count, speed).times
    with Path(file).open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))[:count]
    source = np.random.default_rng(seed)
    items = []
    for row in rows:
        prompt, output = (max(round(int(row[name]) / shrink), 1) for name in workload.TRACE_COLUMNS)
        items.append(workload.Item(source.integers(0, vocab_size, prompt).tolist(), output))
    return list(zip(times, items, strict=True))


@contextmanager
def server(engine: dict[str, Any], **options: Any) -> Iterator[tuple[subprocess.Popen, str]]:
    """(process, URL) of a server with these engine options and its own, ready; if it fails, its log is on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder) / "serve.yaml", Path(folder) / "log"
        config.write_text(
            yaml.safe_dump({"engine": {name: value for name, value in engine.items() if value is not None}})
        )
        command = [sys.executable, "-m", "jaxserve.cli", "serve", "--config", str(config), "--port", "0"]
        with log.open("w") as lines:
            process = subprocess.Popen(command, stderr=lines)
        try:
            yield process, _ready(process, log)
        except BaseException:
            sys.stderr.write("".join(log.read_text().splitlines(keepends=True)[-50:]))
            raise
        finally:
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen, log: Path) -> str:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        if found := re.search(r"listening at (http://\S+)", log.read_text()):
            with suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{found[1]}/ready", timeout=10):
                return found[1]
        time.sleep(0.2)
    raise RuntimeError("the server has not become ready")
