"""The command line: `jaxserve generate | convert`. Options come from the dataclasses, by YAML file or by flag."""

import dataclasses
import gc
import os
import re
import sys
import time
from argparse import ArgumentError
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from jaxserve.commands import convert
from jaxserve.config import EngineConfig
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.validation import nearest_name

if TYPE_CHECKING:
    from jaxserve.llm import LLM

# Errors are reported by `main`, in one line; an option must be spelled out.
_STRICT = {"exit_on_error": False, "allow_abbrev": False}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status. Errors that a user can cause are one line on stderr."""
    parser = ArgumentParser(prog="jaxserve", description="An exact LLM inference engine for JAX.", **_STRICT)
    commands = parser.add_subcommands(required=True, dest="command")
    commands.add_subcommand("generate", _generate_parser(), help="answer prompts, streaming")
    commands.add_subcommand("convert", convert.parser(**_STRICT), help="write a model in another dtype or format")
    given = [_underscored(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
    try:
        options = parser.parse_args(given)
    except ArgumentError as error:
        print(f"jaxserve: {_one_line(str(error))}", file=sys.stderr)
        return 2
    try:
        return {"generate": _generate, "convert": convert.run}[options.command](options[options.command])
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        if os.environ.get("JAXSERVE_TRACEBACK"):
            raise
        print(f"jaxserve: {error}", file=sys.stderr)
        return 1


def _underscored(argument: str) -> str:
    """`--max-num-seqs=8` as `--max_num_seqs=8`: both spellings are known from other engines."""
    name, equals, value = argument.partition("=")
    if not re.fullmatch(r"--[\w.-]+", name):  # a value, maybe a prompt that starts with two hyphens
        return argument
    return "--" + name[2:].replace("-", "_") + equals + value


def _one_line(message: str) -> str:
    """The parser's message, with the nearest right name for an unknown one."""
    unknown = re.search(r"(?:unrecognized arguments: --|does not accept option ')([\w.]+)", message)
    names = [f"engine.{field.name}" for field in dataclasses.fields(EngineConfig) if field.name != "mesh"]
    names += [f"sampling.{field.name}" for field in dataclasses.fields(SamplingParams)]
    nearest = nearest_name(unknown[1], [*names, "config", "prompts", "prompt"]) if unknown else None
    return " ".join(message.split()) + (f" (did you mean {nearest!r}?)" if nearest else "")


def _generate_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Answer prompts together and stream the answers in order.", **_STRICT)
    parser.add_argument("--config", action="config", help="a YAML file with any of these options")
    parser.add_class_arguments(EngineConfig, "engine", skip={"mesh"})
    parser.add_class_arguments(SamplingParams, "sampling")
    parser.add_argument("--prompts", type=list[str], help="the prompts, as a YAML list")
    parser.add_argument("--prompt", type=str, help="one prompt")
    return parser


def _load(config: EngineConfig) -> "LLM":
    """The model, loaded without garbage collection: what start-up makes stays, and looking for more takes a second."""
    gc.disable()
    try:
        from jaxserve.llm import LLM

        return LLM(config=config)
    finally:
        gc.freeze()
        gc.enable()


def _generate(options: Namespace) -> int:
    prompts = [*(options.prompts or []), *([options.prompt] if options.prompt is not None else [])]
    if not prompts:
        raise ValueError("prompts: none given: use --prompt TEXT, --prompts or a config file that holds some")
    # Built before the engine is imported and loaded: a wrong option costs no time.
    config, params = EngineConfig(**_named(options, "engine")), SamplingParams(**_named(options, "sampling"))
    with _load(config) as llm:
        print(llm.engine.memory_plan, file=sys.stderr)
        started = time.perf_counter()
        first, failures = _print_in_order(llm.stream(prompts, params), prompts, params.n)
        seconds = time.perf_counter() - started
        print(_figures(llm.stats(), len(prompts), seconds, first - started))
    return 1 if failures else 0


def _named(options: Namespace, group: str) -> dict:
    if not isinstance(options[group], Namespace):  # the parser lets a bare value of a YAML file through
        raise ValueError(f"{group}={options[group]!r}: {group} must hold options by name")
    return options[group].as_dict()


def _print_in_order(deltas: Iterator[RequestOutput], prompts: list[str], branches: int) -> tuple[float, int]:
    """Stream the first unfinished answer; what the others say meanwhile follows when it is their turn.

    Returns when the first token arrived, and how many answers failed.
    """
    answers = {(index, branch): CompletionOutput(branch) for index in range(len(prompts)) for branch in range(branches)}
    turns = list(answers)
    first, failures, titled = None, 0, False
    for delta in deltas:
        first = first or time.perf_counter()
        for output in delta.outputs:
            answers[int(delta.request_id), output.index].extend(output)
        while turns:
            index, branch = turns[0]
            answer = answers[turns[0]]
            if not titled:
                number = f" [{branch + 1}/{branches}]" if branches > 1 else ""
                print(_title(prompts[index].strip() + number))
            print(answer.text, end="", flush=True)
            answer.text, titled = "", not answer.finished
            if titled:
                break
            print(f"[error: {answer.error}]" if answer.error else "", flush=True)
            failures += answer.finish_reason == "error"
            turns.pop(0)
    return first or time.perf_counter(), failures


def _title(prompt: str) -> str:
    return f"\n\033[1m{prompt}\033[0m" if sys.stdout.isatty() else f"\n> {prompt}"


def _figures(stats: dict, requests: int, seconds: float, first: float) -> str:
    return (
        f"\n{requests} requests in {seconds:.1f} s (first token after {first:.1f} s): "
        f"{stats['prompt_tokens']} prompt tokens ({stats['prompt_tokens'] / seconds:.1f}/s), "
        f"{stats['generation_tokens']} output tokens ({stats['generation_tokens'] / seconds:.1f}/s), "
        f"{stats['prefix_cache_hits']} prefix-cache hits, {stats['steps']} steps, "
        f"{stats['compilations']} compilations ({stats['compilations_from_cache']} from the cache)"
    )


if __name__ == "__main__":
    sys.exit(main())
