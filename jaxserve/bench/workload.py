"""The common work of the offline benchmarks: random prompts, lognormal lengths, greedy, end of sequence ignored.

Imports NumPy only, so that peers in environments of their own can run the same work.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Item(NamedTuple):
    """One request: `prompt` token ids, `output` tokens to generate."""

    prompt: list[int]
    output: int


def trace(requests: int = 64, seed: int = 0, vocab: int = 49152) -> list[Item]:
    """Prompts of 16 to 768 tokens (median 120) and outputs of 8 to 256 (median 64), lognormal with sigma 0.8."""
    source = np.random.default_rng(seed)
    prompts = np.clip(np.exp(source.normal(np.log(120), 0.8, requests)), 16, 768).astype(int)
    outputs = np.clip(np.exp(source.normal(np.log(64), 0.8, requests)), 8, 256).astype(int)
    return [Item(source.integers(100, vocab, int(p)).tolist(), int(o)) for p, o in zip(prompts, outputs, strict=True)]


def fixed(batch: int, prompt: int = 50, output: int = 64, seed: int = 1, vocab: int = 49152) -> list[Item]:
    """`batch` requests of the same lengths."""
    source = np.random.default_rng(seed)
    return [Item(source.integers(100, vocab, prompt).tolist(), output) for _ in range(batch)]


CASES: dict[str, list[Item]] = {
    "trace of 64": trace(64),
    "batch 1": fixed(1),
    "batch 8": fixed(8),
    "batch 32": fixed(32),
}


def measure(name: str, run: Callable[[list[Item]], None], cases: list[str], repeats: int) -> None:
    """Print output tokens per second for each case: the best of `repeats` after one warm-up."""
    for case in cases:
        work = CASES[case]
        run(work)
        best = float("inf")
        for _ in range(repeats):
            started = time.perf_counter()
            run(work)
            best = min(best, time.perf_counter() - started)
        print(f"{name:<24} {case:<12} {sum(item.output for item in work) / best:8.1f} output tokens/s", flush=True)
