"""`jaxserve bench throughput`: how fast the engine works off a batch of requests, and where capacity is wasted."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from jaxserve.bench import workload
from jaxserve.bench.workload import CASES, Item
from jaxserve.cli import bench_serve, bench_soak, bench_speculative
from jaxserve.cli.options import STRICT, add_shared_options, encoded, engine_config, load, sampling_params
from jaxserve.validation import require

if TYPE_CHECKING:
    from jaxserve.engine import Engine

WORK = ("cases", "trace", "dataset")
NUMBERS = ("num_prompts", "input_len", "output_len", "prefix_len", "prefix_share", "seed", "repeats")
OTHERS = {"speculative": bench_speculative, "serve": bench_serve, "soak": bench_soak}
OWN = {
    "throughput": (*WORK, *NUMBERS, "warm_up", "output_json"),
    **{name: module.OWN for name, module in OTHERS.items()},
}
DEFAULT_OUTPUT = 128


def add_options(parser: ArgumentParser) -> None:
    kinds = parser.add_subcommands(required=True, dest="benchmark")
    description = (
        "Requests that are all there from the start, run to the end. The work is random (lognormal lengths, or those "
        "given), one of the common cases, a trace's lengths or the prompts of a file. Greedy to full length unless "
        "sampling options say otherwise."
    )
    throughput = ArgumentParser(description=description, **STRICT)
    kinds.add_subcommand("throughput", throughput, help="a batch of requests, all there from the start")
    add_shared_options(throughput, sampling__temperature=0.0, sampling__ignore_eos=True)
    _add_work(throughput)
    for module in OTHERS.values():
        module.add_options(kinds)


def _add_work(parser: ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="*", choices=list(CASES), help="common cases, as the peers are measured with")
    parser.add_argument("--trace", type=str, help="a CSV file with the columns ContextTokens and GeneratedTokens")
    parser.add_argument("--dataset", type=str, help="a JSONL file of prompts, questions, turns or messages")
    parser.add_argument("--num_prompts", type=int, default=64, help="requests, at most as many as a file holds")
    parser.add_argument("--input_len", type=int, help="prompt tokens of every random request")
    parser.add_argument("--output_len", type=int, help="output tokens of every request")
    parser.add_argument("--prefix_len", type=int, default=0, help="tokens of a prefix shared by some requests")
    parser.add_argument("--prefix_share", type=float, default=1.0, help="the share of requests that have the prefix")
    parser.add_argument("--seed", type=int, default=0, help="of the random work")
    parser.add_argument("--repeats", type=int, default=1, help="runs after the first; the fastest counts")
    parser.add_argument("--warm_up", type=bool, default=True, help="run the work once before it is measured")
    parser.add_argument("--output_json", type=str, help="a file for the results as JSON")


def run(options: Namespace) -> int:
    command = OTHERS[options.benchmark].run if options.benchmark in OTHERS else _throughput
    return command(options[options.benchmark])


def _throughput(options: Namespace) -> int:
    _check(options)
    config, params = engine_config(options), sampling_params(options)
    with load(config) as llm:
        from jaxserve.bench.throughput import measure

        engine = llm.engine
        deterministic = str(engine.deterministic).lower()
        print(f"{engine.memory_plan}\ndeterministic {deterministic}, {config.scheduling_policy}", flush=True)
        reports = []
        for name, wanted in _work(options, engine):
            work, cut = workload.fit(wanted, engine.max_model_len)
            if cut:
                print(f"{name}: {cut} of {len(work)} requests cut to max_model_len={engine.max_model_len}", flush=True)
            reports.append(measure(engine, name, work, params, repeats=options.repeats, warm_up=options.warm_up))
            print(reports[-1], flush=True)
    if options.output_json:
        result = {"engine": options.engine.as_dict(), "results": [report.as_dict() for report in reports]}
        Path(options.output_json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def _check(options: Namespace) -> None:
    given = [name for name in WORK if options[name]]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: the work is one of {', '.join(WORK)}, or random")
    for name in ("num_prompts", "input_len", "output_len", "repeats"):
        require(options[name] is None or options[name] >= 1, name, options[name], "an integer of at least 1")
    require(options.prefix_len >= 0, "prefix_len", options.prefix_len, "an integer of at least 0")
    require(0 <= options.prefix_share <= 1, "prefix_share", options.prefix_share, "a number from 0 to 1")
    for name in ("trace", "dataset"):
        require(options[name] is None or Path(options[name]).is_file(), name, options[name], "an existing file")


def _work(options: Namespace, engine: "Engine") -> list[tuple[str, list[Item]]]:
    """The named pieces of work that the options ask for."""
    count, seed, vocab = options.num_prompts, options.seed, engine.model_config.vocab_size
    if options.cases:
        return [(name, CASES[name]) for name in options.cases]
    if options.trace:
        name, work = Path(options.trace).name, workload.csv_trace(options.trace, count, seed, vocab)
    elif options.dataset:
        name, work = Path(options.dataset).name, _prompts(options.dataset, count, engine)
    elif options.input_len:
        name, work = "random", workload.fixed(count, options.input_len, DEFAULT_OUTPUT, seed, vocab)
    else:
        name, work = "random, lognormal lengths", workload.trace(count, seed, vocab)
    require(bool(work), "work", name, "a file with at least one request")
    if options.output_len:
        work = [item._replace(output=options.output_len) for item in work]
    if options.prefix_len:
        work = workload.share_prefix(work, options.prefix_len, options.prefix_share, seed, vocab)
    return [(name, work)]


def _prompts(file: str, count: int, engine: "Engine") -> list[Item]:
    return [Item(ids, DEFAULT_OUTPUT) for ids in encoded(workload.jsonl_prompts(file, count), engine)]
