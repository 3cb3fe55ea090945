"""`jaxserve bench serve`: load on any server that speaks OpenAI's API, and what its clients see."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from jaxserve.bench import workload
from jaxserve.cli.options import STRICT
from jaxserve.validation import require

DEFAULT_OUTPUT = 128
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
OWN = (
    *("base_url", "endpoint", "model", "api_key", "trace", "dataset", "num_prompts", "input_len"),
    *("output_len", "prefix_len", "prefix_share", "vocab_size", "seed", "request_rate", "max_concurrency", "arrivals"),
    *(
        "speed",
        "temperature",
        "ignore_eos",
        "extra_body",
        "goodput",
        "warm_up",
        "timeout",
        "output_json",
        "output_html",
    ),
)


def add_options(kinds: Any) -> None:
    description = (
        "Streams requests from a server and measures time to the first token (TTFT), time per output token after it "
        "(TPOT), gaps between events (ITL) and whole requests (E2E). Prompts are random tokens (lognormal lengths, or "
        "those given), of a trace's lengths, or a file's."
    )
    parser = ArgumentParser(description=description, **STRICT)
    kinds.add_subcommand("serve", parser, help="a server, as its clients see it")
    add = parser.add_argument
    add("--config", action="config", help="a YAML file with any of these options")
    add("--base_url", type=str, default="http://127.0.0.1:8000", help="the server")
    add("--endpoint", type=str, choices=list(PATHS), default="completions")
    add("--model", type=str, help="the model's name, where the server wants one")
    add("--api_key", type=str, help="the server's key")
    add("--trace", type=str, help="a CSV file with the columns ContextTokens and GeneratedTokens")
    add("--dataset", type=str, help="a JSONL file of prompts, questions, turns or messages")
    add("--num_prompts", type=int, default=64, help="requests, at most as many as a file holds")
    add("--input_len", type=int, help="prompt tokens of every random request")
    add("--output_len", type=int, help="output tokens of every request")
    add("--prefix_len", type=int, default=0, help="tokens of a prefix shared by some requests")
    add("--prefix_share", type=float, default=1.0, help="the share of requests that have the prefix")
    add("--vocab_size", type=int, default=49152, help="random token ids are below it")
    add("--seed", type=int, default=0, help="of the random work and arrivals")
    add("--request_rate", type=float, default=math.inf, help="requests per second (Poisson); inf: all at once")
    add(
        "--max_concurrency", type=int, help="requests under way at most: with rate inf a closed loop of so many clients"
    )
    add("--arrivals", type=str, choices=["rate", "trace"], default="rate", help="trace: its column TIMESTAMP")
    add("--speed", type=float, default=1.0, help="how much faster than the trace requests arrive")
    add("--temperature", type=float, default=0.0)
    add("--ignore_eos", type=bool, default=True, help="every answer has its full length (not OpenAI's own field)")
    add("--extra_body", type=dict, help="more fields for every request")
    add("--goodput", type=str, help="limits in milliseconds, as ttft:500,tpot:50,e2el:9000")
    add("--warm_up", type=int, default=1, help="requests sent before, one after the other")
    add("--timeout", type=float, default=600.0, help="seconds for one request")
    add("--output_json", type=str, help="a file for the results as JSON")
    add("--output_html", type=str, help="a file for the results as a page with plots")


def run(options: Namespace) -> int:
    from jaxserve.bench.client import Client
    from jaxserve.bench.html_report import page
    from jaxserve.bench.serving import Load, ServingReport, drive, parse_limits

    _check(options)
    limits = parse_limits(options.goodput)
    bodies = _bodies(options)
    client = Client(options.base_url, PATHS[options.endpoint], api_key=options.api_key, timeout=options.timeout)
    count, concurrency = len(bodies), options.max_concurrency
    if options.arrivals == "trace":
        load = Load.trace(options.trace, count, options.speed, concurrency)
    else:
        load = Load.poisson(count, options.request_rate, options.seed, concurrency)

    async def measured() -> ServingReport:
        warm = await drive(client, bodies[: options.warm_up], Load(concurrency=1)) if options.warm_up else []
        if warm and all(outcome.error for outcome in warm):
            raise ValueError(f"base_url={options.base_url}: {warm[0].error}")
        return ServingReport.of(_name(options), await drive(client, bodies, load), limits)

    report = asyncio.run(measured())
    print(report)
    settings = {name: options[name] for name in OWN if name != "api_key" and options[name] is not None}
    if options.output_json:
        result = {"settings": settings, "results": [report.as_dict()]}
        Path(options.output_json).write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
    if options.output_html:
        Path(options.output_html).write_text(page([report], settings), encoding="utf-8")
    return 1 if report.failed else 0


def _check(options: Namespace) -> None:
    require(not (options.trace and options.dataset), "trace", options.trace, "left out where dataset is given")
    for name in ("num_prompts", "input_len", "output_len", "max_concurrency", "vocab_size"):
        require(options[name] is None or options[name] >= 1, name, options[name], "an integer of at least 1")
    for name in ("request_rate", "speed", "timeout"):
        require(options[name] > 0, name, options[name], "a number above 0")
    require(options.warm_up >= 0, "warm_up", options.warm_up, "an integer of at least 0")
    require(0 <= options.prefix_share <= 1, "prefix_share", options.prefix_share, "a number from 0 to 1")
    for name in ("trace", "dataset"):
        require(options[name] is None or Path(options[name]).is_file(), name, options[name], "an existing file")
    require(options.arrivals != "trace" or bool(options.trace), "arrivals", options.arrivals, "'rate' without a trace")


def _name(options: Namespace) -> str:
    work = Path(options.trace or options.dataset or "random").name
    if options.arrivals == "trace":
        pace = f"as in the trace, {options.speed:g} times as fast"
    else:
        pace = "all at once" if math.isinf(options.request_rate) else f"{options.request_rate:g} requests/s"
    return f"{work}, {pace}" + (f", at most {options.max_concurrency} at once" if options.max_concurrency else "")


def _bodies(options: Namespace) -> list[dict[str, Any]]:
    common = {"temperature": options.temperature, "stream": True, "stream_options": {"include_usage": True}}
    common |= {"ignore_eos": True} if options.ignore_eos else {}
    common |= {"model": options.model} if options.model else {}
    common |= options.extra_body or {}
    if options.dataset:
        prompts = [(prompt, DEFAULT_OUTPUT) for prompt in workload.jsonl_prompts(options.dataset, options.num_prompts)]
    else:
        prompts = [(item.prompt, item.output) for item in _random(options)]
    if not prompts:
        raise ValueError(f"dataset={options.dataset}: it holds no requests")
    return [
        _prompt(options, prompt) | {"max_tokens": options.output_len or output} | common for prompt, output in prompts
    ]


def _prompt(options: Namespace, prompt: Any) -> dict[str, Any]:
    if options.endpoint == "completions":
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            raise ValueError("endpoint='completions': endpoint must be 'chat' for a dataset of messages")
        return {"prompt": prompt}
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        raise ValueError("endpoint='chat': endpoint must be 'completions' for random tokens; a dataset has texts")
    return {"messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}


def _random(options: Namespace) -> list[workload.Item]:
    count, seed, vocab = options.num_prompts, options.seed, options.vocab_size
    if options.trace:
        work = workload.csv_trace(options.trace, count, seed, vocab)
    elif options.input_len:
        work = workload.fixed(count, options.input_len, DEFAULT_OUTPUT, seed, vocab)
    else:
        work = workload.trace(count, seed, vocab)
    return (
        workload.share_prefix(work, options.prefix_len, options.prefix_share, seed, vocab)
        if options.prefix_len
        else work
    )
