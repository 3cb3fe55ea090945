"""The command line: `jaxserve generate`. Every option comes from the dataclasses, by YAML file or by flag."""

import os
import sys
import time
from collections.abc import Iterator

from jsonargparse import ArgumentParser, Namespace

from jaxserve.config import EngineConfig
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status. Errors that a user can cause are one line on stderr."""
    parser = ArgumentParser(prog="jaxserve", description="An exact LLM inference engine for JAX.")
    commands = parser.add_subcommands(required=True, dest="command")
    commands.add_subcommand("generate", _generate_parser(), help="answer prompts, streaming")
    given = [_underscored(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
    options = parser.parse_args(given)
    try:
        return {"generate": _generate}[options.command](options[options.command])
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        if os.environ.get("JAXSERVE_TRACEBACK"):
            raise
        print(f"jaxserve: {error}", file=sys.stderr)
        return 1


def _underscored(argument: str) -> str:
    """`--max-num-seqs=8` as `--max_num_seqs=8`: both spellings are known from other engines."""
    name, equals, value = argument.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if name.startswith("--") else argument


def _generate_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Answer prompts together and stream the answers in order.")
    parser.add_argument("--config", action="config", help="a YAML file with any of these options")
    parser.add_class_arguments(EngineConfig, "engine", skip={"mesh"})
    parser.add_class_arguments(SamplingParams, "sampling")
    parser.add_argument("--prompts", type=list[str], help="the prompts, as a YAML list")
    parser.add_argument("--prompt", type=str, help="one prompt")
    return parser


def _generate(options: Namespace) -> int:
    prompts = [*(options.prompts or []), *([options.prompt] if options.prompt is not None else [])]
    if not prompts:
        raise ValueError("prompts: none given: use --prompt TEXT, --prompts or a config file that holds some")
    # Built before the engine is imported and loaded: a wrong option costs no time.
    config, params = EngineConfig(**options.engine.as_dict()), SamplingParams(**options.sampling.as_dict())
    from jaxserve.llm import LLM

    with LLM(config=config) as llm:
        print(llm.engine.memory_plan, file=sys.stderr)
        started = time.perf_counter()
        deltas = llm.stream(prompts, params)
        first = _print_in_order(deltas, prompts)
        seconds = time.perf_counter() - started
        print(_figures(llm.stats(), len(prompts), seconds, first - started))
    return 0


def _print_in_order(deltas: Iterator[RequestOutput], prompts: list[str]) -> float:
    """Stream the first unfinished answer; what the others say meanwhile follows when it is their turn.

    Returns when the first token arrived.
    """
    waiting: dict[int, list[tuple[str, bool]]] = {index: [] for index in range(len(prompts))}
    current, first = -1, None
    for delta in deltas:
        first = first or time.perf_counter()
        index = int(delta.request_id)
        text = "".join(output.text for output in delta.outputs)
        waiting[index].append((text, delta.finished))
        while current < len(prompts):
            if current < 0 or (waiting[current] and waiting[current][-1][1] and _flush(waiting[current])):
                current += 1
                if current < len(prompts):
                    print(
                        f"\n\033[1m{prompts[current].strip()}\033[0m"
                        if sys.stdout.isatty()
                        else f"\n> {prompts[current].strip()}"
                    )
                continue
            _flush(waiting[current])
            break
    return first or time.perf_counter()


def _flush(parts: list[tuple[str, bool]]) -> bool:
    """Print and forget these parts; returns whether the answer is complete."""
    complete = bool(parts) and parts[-1][1]
    print("".join(text for text, _ in parts), end="\n" if complete else "", flush=True)
    parts.clear()
    return complete


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
