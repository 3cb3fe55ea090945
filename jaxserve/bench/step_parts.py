"""Where a decode step's time goes, part by part and backend by backend: `python -m jaxserve.bench.step_parts`

Each row of the table is a batch size and a context length; each part is a program of its own over the same arrays.
Backends take turns, so that what else the machine does hits all of them alike; a figure is the least of the
repeats. `rest` is the body without its products and attention: norms, rotations, writing keys and values. `sampling` is
what the head takes longer where every row samples (temperature 0.8, top_p 0.95; from random logits, the flattest there
are). `host` is what `host_work` finds for so many requests; it runs while the device computes.

Beside each part stands its limit: the larger of its bytes over --bandwidth and its operations over --rate.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import Engine, SamplingParams
from jaxserve.bench.host_work import decode_steps
from jaxserve.models.config import ModelConfig
from jaxserve.runner import inputs
from jaxserve.runner.inputs import Runs
from jaxserve.runner.slots import pack_admission
from jaxserve.runner.step import StepDefinition
from jaxserve.runner.weights import Weights


def products(step: StepDefinition, weights: Weights, hidden: jax.Array, count: jax.Array) -> jax.Array:
    """The products of all layers, each waiting for the one before."""
    linear = step.linear(count)
    for definition, leaves in zip(step.model.layers, weights.layers, strict=True):
        layer = definition.build(leaves)
        for weight in (layer.qkv, layer.out, layer.gate_up, layer.down):
            weight = weight[...] if weight is not layer.out else weight[...].reshape(-1, weight.shape[-1])
            out = linear(hidden[:, : weight.shape[0]], weight)
            hidden = hidden + out.reshape(hidden.shape[0], -1)[:, :1]
    return hidden


def attention(step: StepDefinition, kv, slots, packed: jax.Array, q: jax.Array, context: jax.Array) -> jax.Array:
    """The attention of all layers, each waiting for the one before."""
    num_pages, _, _, page_size, _ = kv[0].pages.shape
    unpacked = inputs.unpack_body(packed, q.shape[0], step.attention.work)
    position = jnp.where(unpacked.token_slot < slots.num_slots, context - 1, -1)
    prepared = step.attention.prepare(
        unpacked.work, slots.page_table[0], unpacked.token_slot, position, num_pages=num_pages, page_size=page_size
    )
    scale = step.model.config.head_dim**-0.5
    for window, layer in zip(step.model.config.windows, kv, strict=True):
        q = q + step.attention.attend(q, layer.pages, prepared, scale=scale, window=window)
    return q


class Parts:
    """The programs of one engine for one batch size and context length. Slots and pages are filled once."""

    def __init__(self, engine: Engine, batch: int, context: int):
        self.engine, self.batch, self.context = engine, batch, context
        runner, config = engine.runner, engine.model_config
        self.pages_each = -(-(context + 1) // engine.scheduler.page_size)
        for slot in range(batch):
            pages = [(slot * self.pages_each + i) % runner.num_pages for i in range(self.pages_each)]
            self._admit(slot, pages, SamplingParams(temperature=0))
        self.runs = Runs.of((slot, context - 1, 1, True) for slot in range(batch))
        tokens = runner.buckets.token_bucket(batch)
        self.packed = inputs.pack_body(self.runs, [], tokens, runner.num_slots, runner.step.attention.work)
        dtype, random = runner.weights.embed.dtype, np.random.default_rng(0)
        array = lambda *shape: jnp.asarray(random.standard_normal(shape), dtype)
        self.hidden = array(tokens, max(config.hidden_size, config.intermediate_size))
        self.head_hidden = array(runner.step.max_tokens, config.hidden_size)
        self.q = array(tokens, config.num_heads, config.head_dim)
        self.count = jnp.int32(batch)
        self._products = jax.jit(partial(products, runner.step))
        self._attention = jax.jit(partial(attention, runner.step))

    def _admit(self, slot: int, pages: list[int], params: SamplingParams) -> None:
        runner = self.engine.runner
        ids, computed = [7] * self.context, self.context - 1
        size = runner.max_len, runner.max_pages
        runner.admit(pack_admission(slot, ids, pages, computed, 0, params, 1, self.context, None, *size))

    def programs(self) -> dict[str, Callable[[], object]]:
        """What to time, by name."""
        runner = self.engine.runner
        return {
            "products": lambda: self._products(runner.weights, self.hidden, self.count),
            "attention": lambda: self._attention(runner.kv, runner.slots, self.packed, self.q, jnp.int32(self.context)),
            "body": self._body,
            "head": partial(self.head, greedy=True),
        }

    def _body(self) -> object:
        runner = self.engine.runner
        body = runner.compiler.get(runner.described.body(len(self.hidden)))
        back = runner.slots._replace(num_computed=jnp.full(runner.num_slots, self.context - 1, jnp.int32))
        jax.block_until_ready(back)
        runner.kv, runner.slots, hidden, _ = body(runner.weights, runner.kv, back, self.packed)
        return hidden

    def head(self, *, greedy: bool) -> object:
        runner = self.engine.runner
        rows = runner.buckets.row_bucket(self.batch)
        head = runner.compiler.get(runner.described.head(rows, greedy))
        packed = inputs.pack_head(self.runs, rows, runner.num_slots)
        runner.slots, sampled = head(runner.weights.head, runner.slots, self.head_hidden, packed)
        return sampled

    def sampled(self) -> None:
        """Let all slots sample from here on."""
        for slot in range(self.batch):
            pages = [(slot * self.pages_each + i) % self.engine.runner.num_pages for i in range(self.pages_each)]
            self._admit(slot, pages, SamplingParams(temperature=0.8, top_p=0.95))


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def measure(engines: dict[str, Engine], batch: int, context: int, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each part by backend."""
    parts = {name: Parts(engine, batch, context) for name, engine in engines.items()}
    best = {name: {} for name in parts}
    for sampled in (False, True):
        if sampled:
            for part in parts.values():
                part.sampled()
        for turn in range(repeats + 1):
            for name, part in parts.items():
                programs = {"head, sampled": partial(part.head, greedy=False)} if sampled else part.programs()
                for what, call in programs.items():
                    took = 1e3 * seconds(call)
                    if turn:  # the first turn compiles
                        best[name][what] = min(took, best[name].get(what, took))
    for figures in best.values():
        figures["rest"] = figures["body"] - figures["products"] - figures["attention"]
        figures["sampling"] = figures["head, sampled"] - figures["head"]
    return best


def limits(
    config: ModelConfig, batch: int, context: int, *, itemsize: int, bandwidth: float, rate: float
) -> dict[str, float]:
    """The least milliseconds of each part at `bandwidth` GB/s and `rate` GFLOP/s; 0 for the host, which hides."""
    layers = config.num_layers
    sides = {name: side for name, side in config.products.items() if name != "head"}
    weights = layers * sum(rows * columns for rows, columns in sides.values())
    head = config.vocab_size * config.hidden_size
    keys = layers * batch * context
    most = lambda bytes, operations: 1e3 * max(bytes / (1e9 * bandwidth), operations / (1e9 * rate))
    row = sum(columns + rows for rows, columns in sides.values())  # what the products take and give, once
    return {
        "products": most(itemsize * weights, 2 * batch * weights),
        "attention": most(
            2 * itemsize * keys * config.num_kv_heads * config.head_dim, 4 * keys * config.num_heads * config.head_dim
        ),
        "rest": most(layers * batch * row * itemsize, 0),
        "head": most(itemsize * head, 2 * batch * head),
        "sampling": most(4 * batch * config.vocab_size, 0),
        "host": 0.0,
    }


PARTS = ("products", "attention", "rest", "head", "sampling", "host")


def line(name: str, batch: int, context: int, figures: dict[str, float], least: dict[str, float]) -> str:
    """A row of the table: each part and its limit, and what a greedy step takes in all."""
    cells = [f"{figures[part]:.1f} | {least[part]:.1f}" for part in PARTS]
    return f"| {name} | {batch} | {context} | {' | '.join(cells)} | {figures['body'] + figures['head']:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id (default: the demo model)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--backends", nargs="*", default=["native", "xla"], choices=["native", "xla"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--contexts", nargs="*", type=int, default=[80, 512, 2040])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bandwidth", type=float, default=15.0, help="GB/s of memory")
    parser.add_argument("--rate", type=float, default=150.0, help="GFLOP/s of arithmetic in float32")
    options = parser.parse_args()
    engines = {
        name: Engine(
            model=options.model,
            dtype=options.dtype,
            attention_backend=name,
            linear_backend=name,
            max_model_len=max(options.contexts) + 8,
            max_num_seqs=max(*options.batches, 8),
            max_num_batched_tokens=max(*options.batches, 128),
        )
        for name in options.backends
    }
    host = {batch: 1e-3 * decode_steps(batch)["step"] for batch in options.batches}
    print("| ms | batch | context | " + " | limit | ".join(PARTS) + " | limit | greedy step |")
    print("|---" * (2 * len(PARTS) + 4) + "|", flush=True)
    for context in options.contexts:
        for batch in options.batches:
            for name, figures in measure(engines, batch, context, options.repeats).items():
                runner = engines[name].runner
                itemsize = runner.weights.embed.dtype.itemsize
                known = {"itemsize": itemsize, "bandwidth": options.bandwidth, "rate": options.rate}
                least = limits(engines[name].model_config, batch, context, **known)
                print(line(name, batch, context, figures | {"host": host[batch]}, least), flush=True)


if __name__ == "__main__":
    main()
