"""`jaxserve batch`: answer a file of requests in OpenAI's batch format."""

import sys

from jsonargparse import ArgumentParser, Namespace

from jaxserve.cli.options import add_shared_options, engine_config

OWN = ("input", "output", "unordered", "overwrite", "progress", "served_model_name")


def add_options(parser: ArgumentParser) -> None:
    add_shared_options(parser, sampling=False)
    add = parser.add_argument
    add("-i", "--input", type=str, required=True, help="a JSONL file of requests")
    add("-o", "--output", type=str, required=True, help="the JSONL file of the answers; one that is there is continued")
    add("--unordered", action="store_true", help="leave the answers in the order in which they finished")
    add("--overwrite", action="store_true", help="start over")
    add("--progress", type=bool, help="a progress bar; only on a terminal unless it is said")
    add("--served_model_name", type=str, help="the model's name in requests and answers; others are refused")


def run(options: Namespace) -> int:
    """0 if every request was answered, 1 if any line of the output is an error."""
    from jaxserve.evaluation.batch import run_batch

    config, name = engine_config(options), options.served_model_name
    failed = run_batch(
        options.input,
        options.output,
        config,
        model_name=name,
        ordered=not options.unordered,
        overwrite=options.overwrite,
        use_tqdm=options.progress,
    )
    if failed:
        print(f"jaxserve: {failed} lines of {options.output} are errors", file=sys.stderr)
    return 1 if failed else 0
