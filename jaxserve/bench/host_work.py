"""What a step costs the host: `python -m jaxserve.bench.host_work [--running 16 256] [--repeats 5] [--profile]`

Engine, scheduler, block pool, packing and post-processing are the real ones; the compiled programs are replaced by
functions that answer at once, so what remains is host work (dispatching a program, 0.1 to 0.3 ms on a CPU, and
detokenisation are not in it: the engine has no tokenizer here). Every request decodes, which is where a step is
shortest and the host matters most; `trace` is the common trace, prompts and admissions included.

A figure is that of the best of the repeats: whoever else uses the machine only adds to it.
"""

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve import Engine, SamplingParams
from jaxserve.bench.workload import Item, fixed, trace
from jaxserve.models.config import ModelConfig
from jaxserve.models.weights import random_decoder
from jaxserve.runner.compilation import Program
from jaxserve.runner.head import Sampled

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
PARTS = ("schedule", "dispatch", "process")
STEPS, WARM_UP = 200, 20


class HostArray(np.ndarray):
    """An array that is on the host already."""

    def copy_to_host_async(self) -> None:
        pass


class InstantDevice:
    """Takes the place of `Runner.compiler`: programs that compute nothing. Every sampled token is 1."""

    num_compiled = num_loaded = num_after_warmup = 0

    def __init__(self):
        self._made: dict[tuple[str, int], Callable] = {}

    def get_all(self, programs: list[Program]) -> list[Callable]:
        return [self.get(program) for program in programs]

    def get(self, program: Program) -> Callable:
        if program.key not in self._made:
            self._made[program.key] = self._make(program)
        return self._made[program.key]

    @staticmethod
    def _make(program: Program) -> Callable:
        array = lambda dtype, size: np.ones(size, dtype).view(HostArray)
        match program.name:
            case "body":
                finite, hidden = array(bool, program.bucket), jnp.zeros(0)
                return lambda weights, kv, slots, packed: (kv, slots, hidden, finite)
            case "head" | "greedy_head":
                sampled = Sampled(array(np.int32, program.bucket), None)
                return lambda lm_head, slots, hidden, packed: (slots, sampled)
            case _:  # admit, set_tables, copy_pages: the donated state comes back
                return lambda state, *packed: state

    def has(self, program: Program) -> bool:
        return True

    def clear(self) -> None:
        pass


class Stopwatch:
    """Seconds of this thread spent in some methods, from when they are wrapped."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}

    def watch(self, owner: Any, method: str, name: str) -> None:
        inner, spent = getattr(owner, method), self.seconds.setdefault(name, [])

        def timed(*arguments, **options):
            started = time.thread_time()
            try:
                return inner(*arguments, **options)
            finally:
                spent.append(time.thread_time() - started)

        setattr(owner, method, timed)


def instant_engine(max_num_seqs: int, max_num_batched_tokens: int, **options: Any) -> Engine:
    """An engine whose device answers at once."""
    decoder = random_decoder(ModelConfig.from_hf(MODEL), seed=0, dtype=jnp.dtype("bfloat16"))
    engine = Engine(
        decoder=decoder,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_pages=max_num_seqs * 32,
        deterministic=False,
        compilation_cache_dir="",
        **options,
    )
    engine.runner.compiler = InstantDevice()
    return engine


def decode_steps(running: int, *, profile: bool = False, steps: int = STEPS, **options: Any) -> dict[str, float]:
    """Median microseconds of a step in which `running` requests decode, in all and by part."""
    with decoding_engine(running, **options) as engine:
        watch = Stopwatch()
        watch.watch(engine.scheduler, "schedule", "schedule")
        watch.watch(engine, "_dispatch", "dispatch")
        watch.watch(engine, "_process", "process")
        watch.watch(engine, "step", "step")
        _run(engine, steps, profile)
        return {name: 1e6 * statistics.median(watch.seconds[name]) for name in ("step", *PARTS)}


def prefix_cache_us(running: int, *, steps: int = STEPS, **options: Any) -> float:
    """Mean microseconds that a step of `running` decoding requests spends on hashing and registering pages."""
    with decoding_engine(running, **options) as engine:
        watch = Stopwatch()
        watch.watch(engine.scheduler, "_register_pages", "prefix cache")
        _run(engine, steps, profile=False)
        return 1e6 * sum(watch.seconds["prefix cache"]) / steps


def decoding_engine(running: int, **options: Any) -> Engine:
    """An engine in which so many requests decode."""
    engine = instant_engine(running, 2 * max(running, 64), **options)
    _add(engine, fixed(running, prompt=50, output=400, vocab=512))
    while len(engine.scheduler.running) < running or any(r.num_to_compute > 1 for r in engine.scheduler.running):
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    return engine


def trace_steps(**options: Any) -> dict[str, float]:
    """Mean microseconds of a step on the common trace, and those spent on page hashes and look-ups."""
    with instant_engine(64, 128, **options) as engine:
        _add(engine, trace(64, vocab=512))
        watch = Stopwatch()
        watch.watch(engine.scheduler, "_register_pages", "prefix cache")
        watch.watch(engine.scheduler, "_known_prefix", "look-up")
        watch.watch(engine, "step", "step")
        while engine.has_unfinished():
            engine.step()
        steps = len(watch.seconds["step"])
        cache = sum(watch.seconds["prefix cache"]) + sum(watch.seconds["look-up"])
        return {"step": 1e6 * sum(watch.seconds["step"]) / steps, "prefix cache": 1e6 * cache / steps}


def _add(engine: Engine, work: list[Item]) -> None:
    for index, item in enumerate(work):
        params = SamplingParams(temperature=0, max_tokens=item.output, ignore_eos=True)
        engine.add_request(str(index), item.prompt, params)


def _run(engine: Engine, steps: int, profile: bool) -> None:
    gc.collect()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    for _ in range(steps):
        engine.step()
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", nargs="*", type=int, default=[16, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    repeats = 1 if options.profile else options.repeats
    best = lambda measure: min((measure() for _ in range(repeats)), key=itemgetter("step"))
    for running in options.running:
        found = best(lambda running=running: decode_steps(running, profile=options.profile))
        found["prefix cache"] = min(prefix_cache_us(running) for _ in range(repeats))
        print(f"{running} running: " + ", ".join(f"{name} {value:.0f} us" for name, value in found.items()), flush=True)
    print("trace: " + ", ".join(f"{name} {value:.0f} us" for name, value in best(trace_steps).items()))


if __name__ == "__main__":
    main()
