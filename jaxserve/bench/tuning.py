"""What each dial does to a server on this machine: `python -m jaxserve.bench.tuning [--parts budget seqs ...]`

Servers are processes of their own with the demo model; client and server share the machine. Prints tables in Markdown,
those of docs/TUNING.md. Takes about an hour in all.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.client import Client, Outcome
from jaxserve.bench.serving import Load, ServingReport, drive
from jaxserve.bench.soak import read_metrics
from jaxserve.bench.workload import Item, fixed, share_prefix
from jaxserve.cli.bench_soak import server

COMMON = {"max_model_len": 2048, "compile": "warmup"}
DECODING, QUIET_SECONDS = 8, 4.0


def body(item: Item, **more: Any) -> dict[str, Any]:
    shown = {"stream": True, "stream_options": {"include_usage": True}}
    return {"prompt": item.prompt, "max_tokens": item.output, "temperature": 0, "ignore_eos": True} | shown | more


def serve_and(measure: Callable, **engine: Any) -> Any:
    """What `measure(url)` finds at a server with these engine options, after a request that warms it up."""
    with server(COMMON | engine) as (_, url):
        asyncio.run(drive(Client(url, "/v1/completions"), [body(item) for item in fixed(2, 20, 8, seed=9)], Load()))
        return measure(url)


def closed_loop(work: Sequence[Item], concurrency: int) -> Callable[[str], ServingReport]:
    def measure(url: str) -> ServingReport:
        client = Client(url, "/v1/completions")
        return ServingReport.of("", asyncio.run(drive(client, [body(i) for i in work], Load(concurrency=concurrency))))

    return measure


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print(
            "| " + " | ".join(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row) + " |",
            flush=True,
        )
    print()


def streaming_share() -> None:
    """Output tokens per second of 32 streaming clients against the engine alone, in a thread and in a process."""
    work = fixed(32, 50, 128)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "offline.json"
        options = ["--num_prompts", "32", "--input_len", "50", "--output_len", "128", "--repeats", "2", "--seed", "1"]
        options += ["--engine.max_model_len", "2048", "--engine.max_num_seqs", "32", "--output_json", str(file)]
        # No prefix cache here and below: the better of two runs would find the other's prompts there.
        options += ["--engine.enable_prefix_caching", "false"]
        subprocess.run([sys.executable, "-m", "jaxserve.cli", "bench", "throughput", *options], check=True, stdout=2)
        offline = json.loads(file.read_text())["results"][0]["output_tokens_per_s"]
    rows = [("engine alone", offline, 100.0)]
    for run_in in ("thread", "process"):
        with server(COMMON | {"max_num_seqs": 32, "enable_prefix_caching": False}, run_in=run_in) as (_, url):
            measure = closed_loop(work, 32)
            best = max(measure(url).rates["output_tokens_per_s"] for _ in range(2))
        rows.append((f"server, engine in a {run_in}", best, 100 * best / offline))
    table(("32 streams", "output tokens/s", "% of the engine alone"), rows)


async def long_prompt_among_decoders(url: str, length: int, tokens: int) -> tuple[Sequence[Outcome], Outcome, float]:
    """(clients that decode so many tokens, one whose prompt of `length` comes meanwhile, when it came)."""
    client, origin = Client(url, "/v1/completions"), time.perf_counter()
    decoders = [
        asyncio.create_task(client.stream(body(item), origin)) for item in fixed(DECODING, 32, tokens, seed=length)
    ]
    await asyncio.sleep(QUIET_SECONDS)
    sent = time.perf_counter() - origin
    late = await client.stream(body(fixed(1, length, 1, seed=length + 1)[0]), origin)
    return await asyncio.gather(*decoders), late, sent


def token_budget() -> None:
    """Gaps of eight decoding clients, quiet and while a long prompt is computed, and that prompt's first token."""
    rows = []
    for length, tokens, most in ((1000, 400, 1600), (4000, 600, 4700)):
        for budget in (12, 16, 32, 64, 128, 256, None):
            tokens_of_step = budget or most
            engine = {"max_model_len": most, "max_num_seqs": min(16, tokens_of_step)}
            engine["max_num_batched_tokens"] = tokens_of_step
            engine |= {} if budget else {"enable_chunked_prefill": False}
            find = lambda url, case=(length, tokens): asyncio.run(long_prompt_among_decoders(url, *case))
            decoders, late, sent = serve_and(find, **engine)
            quiet, busy = [], []
            for one in decoders:
                for at, gap in zip(one.events[1:], one.gaps, strict=True):
                    if at < sent:
                        quiet.append(1000 * gap)
                    elif at - gap < late.ended:
                        busy.append(1000 * gap)
            median, p99 = statistics.median(quiet), float(np.percentile(busy, 99))
            rows.append((length, budget or "whole", median, p99, p99 / median, 1000 * late.ttft))
    table(("prompt", "token budget", "quiet median, ms", "p99 meanwhile, ms", "ratio", "its TTFT, ms"), rows)


def most_sequences() -> None:
    """Throughput by `max_num_seqs`, with a pool that is too small for the largest."""
    rows = []
    for seqs in (1, 2, 4, 8, 16, 32, 64):
        work = fixed(2 * seqs, 100, 100)
        with server(COMMON | {"max_num_seqs": seqs, "num_pages": 512}) as (_, url):
            report = closed_loop(work, seqs)(url)
            preempted = read_metrics(url)["jaxserve:num_preemptions_total"]
        rates, gaps = report.rates, report.percentiles("ITL")
        rows.append((seqs, rates["output_tokens_per_s"], gaps["p50"], gaps["p99"], int(preempted)))
    table(("max_num_seqs = clients", "output tokens/s", "ITL p50, ms", "ITL p99, ms", "preemptions"), rows)


def sizes_and_switches() -> None:
    """Page size, prefix caching, determinism and drafts: throughput and first tokens of 16 clients."""
    plain = fixed(32, 200, 64)
    shared = share_prefix(fixed(32, 40, 64), 600, 1.0)
    cases = [(f"page_size {size}", {"page_size": size}, plain) for size in (8, 16, 32, 64)]
    cases += [(f"shared prefix, caching {on}", {"enable_prefix_caching": on}, shared) for on in (True, False)]
    cases += [(f"random prompts, caching {on}", {"enable_prefix_caching": on}, plain) for on in (True, False)]
    cases += [(f"deterministic {on}", {"deterministic": on}, plain) for on in (True, False)]
    ngram = {"method": "ngram", "num_speculative_tokens": 7}
    cases += [
        (f"ngram, length {control}", {"speculative_config": ngram | {"length_control": control}}, plain)
        for control in ("auto", "fixed")
    ]
    rows = []
    for name, engine, work in cases:
        report = serve_and(closed_loop(work, 16), max_num_seqs=16, **engine)
        first = report.percentiles("TTFT")
        rows.append((name, report.rates["output_tokens_per_s"], first["p50"], first["p99"], report.cached_tokens))
    table(("", "output tokens/s", "TTFT p50, ms", "TTFT p99, ms", "cached tokens"), rows)


PARTS = {"share": streaming_share, "budget": token_budget, "seqs": most_sequences, "switches": sizes_and_switches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    for name in parser.parse_args().parts:
        print(f"{PARTS[name].__doc__}\n", flush=True)
        PARTS[name]()


if __name__ == "__main__":
    main()
