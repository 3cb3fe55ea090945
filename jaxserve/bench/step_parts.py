"""Where a decode step's time goes, part by part and backend by backend: `python -m jaxserve.bench.step_parts`

Each row of the table is a batch size and a context length; each part is a program of its own over the same arrays.
Backends take turns, so that what else the machine does hits all of them alike; a figure is the least of the
repeats. `rest` is the body without its products and attention: norms, rotations, writing keys and values.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import Engine, SamplingParams
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
            "head, greedy": partial(self.head, greedy=True),
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
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id (default: the demo model)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--backends", nargs="*", default=["native", "xla"], choices=["native", "xla"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--contexts", nargs="*", type=int, default=[80, 512, 2040])
    parser.add_argument("--repeats", type=int, default=5)
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
    shown = ("products", "attention", "rest", "body", "head, greedy", "head, sampled")
    print(f"{'milliseconds':<10} {'batch':>5} {'context':>7} " + " ".join(f"{name:>13}" for name in shown))
    for context in options.contexts:
        for batch in options.batches:
            for name, figures in measure(engines, batch, context, options.repeats).items():
                line = " ".join(f"{figures[what]:13.2f}" for what in shown)
                print(f"{name:<12} {batch:>5} {context:>7} {line}", flush=True)


if __name__ == "__main__":
    main()
