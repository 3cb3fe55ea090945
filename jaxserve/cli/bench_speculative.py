"""`jaxserve bench speculative`: what drafts gain, by kind of prompt and by load."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from jaxserve.cli.options import STRICT, add_shared_options, encoded, engine_config, load
from jaxserve.validation import require

OWN = ("dataset", "groups", "concurrency", "output_dir")


def add_options(kinds: Any) -> None:
    description = (
        "Pairs of runs, without and with drafts, of a file's prompts by category and by requests at once: 64 tokens "
        "each, greedy, prompts computed before. What is measured already is not measured again."
    )
    parser = ArgumentParser(description=description, **STRICT)
    kinds.add_subcommand("speculative", parser, help="what speculative decoding gains")
    add_shared_options(parser, sampling=False)
    parser.add_argument("--dataset", type=str, help="a JSONL file of prompts, with `turns` and `category`")
    parser.add_argument("--groups", type=str, nargs="*", help="the groups to measure; all by default")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 4, 16, 64], help="requests at once")
    parser.add_argument("--output_dir", type=str, help="a folder for cells.jsonl and speedup.svg")


def run(options: Namespace) -> int:
    from jaxserve.bench import speculative as bench

    require(bool(options.dataset) and Path(options.dataset).is_file(), "dataset", options.dataset, "an existing file")
    config = engine_config(options)
    if config.speculative_config is None:
        raise ValueError("speculative_config=None: speculative_config must name a method: there is nothing to measure")
    groups = bench.groups_of(options.dataset)
    for name in options.groups or ():
        require(name in groups, "groups", name, f"some of {', '.join(groups)}")
    folder = Path(options.output_dir) if options.output_dir else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    chat = lambda text: [{"role": "user", "content": text}]
    with load(config) as llm, load(replace(config, speculative_config=None)) as plain:
        prompts = {
            name: encoded(map(chat, bench.spread(texts, max(bench.PROMPTS.values()))), llm.engine)
            for name, texts in groups.items()
            if not options.groups or name in options.groups
        }
        line = lambda values: print("| " + " | ".join(values) + " |", flush=True)
        line(bench.HEADINGS)
        line(["---"] * len(bench.HEADINGS))
        journal = folder / "cells.jsonl" if folder is not None else None
        engines = bench.Engines(without=plain.engine, with_=llm.engine)
        cells = bench.run_cells(engines, prompts, options.concurrency, journal, lambda cell: line(cell.row()))
    print(bench.summary(cells))
    if folder is not None:
        bench.plot(cells, folder / "speedup.svg")
    return 0
