"""Sections of `gpu_check` about whole steps of a Llama-3-8B-shaped model with random weights."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.bench.gpu_attention import backend_of
from jaxserve.bench.gpu_kernels import interpretation
from jaxserve.bench.gpu_sizes import Sizes
from jaxserve.bench.report import Report
from jaxserve.cache.kv_cache import KVLayout
from jaxserve.kernels_pallas.matmul import MosaicLinear
from jaxserve.kernels_pallas.paged_attention.benchmark import Heads
from jaxserve.kernels_pallas.roofline import HBM_BYTES_PER_S
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.runner import determinism
from jaxserve.runner.compilation import Program
from jaxserve.runner.inputs import Runs
from jaxserve.runner.runner import Runner
from jaxserve.runner.slots import pack_admission
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.buckets import Buckets

_NO_COMMAND_BUFFERS = {"xla_gpu_graph_min_graph_size": 10**6}
_STEPS = 64  # at most, of one request


def runner_of(sizes: Sizes, layers: int, *, deterministic: bool = False) -> Runner:
    """A runner over random weights with room for the largest of `sizes.batches`."""
    config = ModelConfig.from_hf(sizes.model | {"num_hidden_layers": layers})
    heads = Heads(config.num_kv_heads, config.q_per_group, config.head_dim)
    pages = [batch * _pages_each(sizes, context) for batch, context in sizes.batches]
    most = max(batch for batch, _ in sizes.batches)
    return Runner(
        Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16),
        layout=KVLayout(layers, config.num_kv_heads, config.head_dim, sizes.page_size, jnp.dtype("bfloat16")),
        num_pages=max(pages),
        num_slots=most,
        max_len=sizes.max_len,
        buckets=Buckets.make(most, most),
        attention=backend_of(sizes, heads, sizes.max_len),
        linear_kernel=MosaicLinear(interpretation(sizes)) if deterministic else None,
    )


def step_bits(report: Report, sizes: Sizes) -> None:
    """The engine's own test at start: a row of a layer and of the head in the smallest and the largest bucket."""
    runner = runner_of(sizes, 1, deterministic=True)
    ends = [(found[0], found[-1]) for found in (runner.buckets.tokens, runner.buckets.rows)]
    differs = determinism.row_invariance(runner.step, runner.weights, *ends, runner.compiler)
    report.add("a row in the smallest and the largest bucket", differs or "same bits", ok=differs is None)
    runner.close()


def decode_steps(report: Report, sizes: Sizes) -> None:
    """Body and greedy head against the bytes of weights and cache, with and without command buffers; what the host
    spends on a step."""
    for layers in sizes.layers:
        runner = runner_of(sizes, layers)
        for graphs in (True, False):
            runner.compiler.clear()
            runner.compiler.options = {} if graphs or sizes.interpret else _NO_COMMAND_BUFFERS
            how = f"{layers} layers, {'command buffers' if graphs else 'no command buffers'}"
            if not report.has_time(how):
                continue
            started = time.perf_counter()
            runner.compiler.get_all(_programs(runner, sizes))
            report.add(f"{how}: compiled together", time.perf_counter() - started, "s")
            for batch, context in sizes.batches:
                name = f"{how}, batch {batch}, context {context}"
                if report.has_time(name):
                    _fill_slots(runner, sizes, batch, context)
                    _decode(report, sizes, runner, name, batch, context)
        runner.close()


def _programs(runner: Runner, sizes: Sizes) -> list[Program]:
    """What the timed steps run, each once."""
    batches = [batch for batch, _ in sizes.batches]
    bodies = {runner.buckets.token_bucket(batch) for batch in batches}
    heads = {runner.buckets.row_bucket(batch) for batch in batches}
    described = runner.described
    return [*map(described.body, bodies), *(described.head(rows, True) for rows in heads), described.admit()]


def _fill_slots(runner: Runner, sizes: Sizes, batch: int, context: int) -> None:
    each = _pages_each(sizes, context)
    size = runner.max_len, runner.max_pages
    for slot in range(batch):
        pages = list(range(slot * each, (slot + 1) * each))
        params = SamplingParams(temperature=0)
        runner.admit(pack_admission(slot, [7] * context, pages, context - 1, 0, params, 1, context, None, *size))


def _pages_each(sizes: Sizes, context: int) -> int:
    """Room for the context and for every step that is timed."""
    return -(-(context + _STEPS) // sizes.page_size)


def _decode(report: Report, sizes: Sizes, runner: Runner, name: str, batch: int, context: int) -> None:
    floor = step_bytes(runner, batch, context) / HBM_BYTES_PER_S
    took, host = _time_steps(runner, batch, context, sizes.repeats)
    report.add(name, took * 1e3, "ms", share=floor / took)
    report.add(f"{name}: host", host * 1e6, "us")


def step_bytes(runner: Runner, batch: int, context: int) -> int:
    """What a decode step must read: every weight but the embedding's unused rows, and the keys and values."""
    weights = runner.weights
    read = sum(leaf.nbytes for leaf in jax.tree.leaves((weights.layers, weights.norm, weights.head)))
    config, pages = runner.step.model.config, runner.kv[0].pages
    per_token = 2 * config.num_kv_heads * config.head_dim * pages.dtype.itemsize * config.num_layers
    return read + batch * context * per_token


def _time_steps(runner: Runner, batch: int, context: int, repeats: int) -> tuple[float, float]:
    """Seconds of a step among others in flight, and those that the host spent on it."""
    runs = Runs.of((slot, context - 1, 1, True) for slot in range(batch))
    step = partial(runner.run, runs, [], greedy=True)
    step().result()
    host, started = [], time.perf_counter()
    for _ in range(repeats):
        began = time.perf_counter()
        handle = step()
        host.append(time.perf_counter() - began)
    handle.result()
    return (time.perf_counter() - started) / repeats, float(np.median(host))


CORRECTNESS = {"step bits": step_bits}
SPEED = {"decode steps": decode_steps}
