"""`jaxserve generate`: prompts are answered together, and the answers streamed in order."""

import sys
import time
from collections.abc import Iterator

from jsonargparse import ArgumentParser, Namespace

from jaxserve.cli.options import add_shared_options, engine_config, load, sampling_params
from jaxserve.outputs import CompletionOutput, RequestOutput

OWN = ("prompt", "prompts")


def add_options(parser: ArgumentParser) -> None:
    add_shared_options(parser)
    parser.add_argument("--prompts", type=list[str], help="the prompts, as a YAML list")
    parser.add_argument("--prompt", type=str, help="one prompt")


def run(options: Namespace) -> int:
    prompts = [*(options.prompts or []), *([options.prompt] if options.prompt is not None else [])]
    if not prompts:
        raise ValueError("prompts: none given: use --prompt TEXT, --prompts or a config file that holds some")
    # Built before the engine is imported and loaded: a wrong option costs no time.
    config, _ = engine_config(options), sampling_params(options)
    with load(config) as llm:
        params = sampling_params(options, llm.engine.default_sampling_params)
        print(llm.engine.memory_plan, file=sys.stderr)
        started = time.perf_counter()
        first, failures = _print_in_order(llm.stream(prompts, params), prompts, params.n)
        seconds = time.perf_counter() - started
        print(_figures(llm.stats(), len(prompts), seconds, first - started))
    return 1 if failures else 0


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
