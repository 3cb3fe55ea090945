"""What paged attention costs, by shape, and how long it takes.

    python -m jaxserve.kernels_pallas.paged_attention.benchmark

Bytes and operations follow from the shape; the floor is the longer of the two on an H200, by its data sheet. Where
there is a GPU each shape is timed, over pages of several times its cache; elsewhere only the floor is printed.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels_pallas.paged_attention import AttentionBackend, choose_attention
from jaxserve.kernels_pallas.paged_attention.work_list import QueryRun, pack_runs
from jaxserve.kernels_pallas.roofline import Cost

POOL_BYTES = 4 * 2**30
MOST_BYTES = 16 * 2**30


class Heads(NamedTuple):
    """A model's attention, elements of 2 bytes."""

    kv_heads: int
    group: int  # query heads a KV head
    head_dim: int


def cost(heads: Heads, runs: list[QueryRun], split: int = 0) -> Cost:
    """Of attention over these runs: each reads its context once, however many query tokens it has, and computes every
    pair of a query token and a key that it sees. `split`: keys after which results are written and read again."""
    keys = sum(run.start + run.count for run in runs)
    tokens = sum(run.count for run in runs)
    pairs = sum(run.count * run.start + run.count * (run.count + 1) // 2 for run in runs)
    row = heads.kv_heads * heads.group * heads.head_dim
    size = 2 * (2 * keys * heads.kv_heads * heads.head_dim + 2 * tokens * row)
    if split:
        parts = sum(run.count * -(-(run.start + run.count) // split) for run in runs if run.start + run.count > split)
        size += 2 * 4 * parts * heads.kv_heads * heads.group * (heads.head_dim + 32)
    return Cost(size, 4 * pairs * row)


class Case(NamedTuple):
    name: str
    runs: list[QueryRun]
    tokens: int  # of the bucket
    split: int


def cases(batches: list[int], contexts: list[int], prompts: list[int], drafts: int) -> Iterator[Case]:
    bucket = lambda tokens: -(-tokens // 8) * 8
    for context in contexts:
        for batch in batches:
            runs = [QueryRun(row, context - 1, 1) for row in range(batch)]
            yield Case(f"decode {batch} x {context}", runs, bucket(batch), 512)
        count = drafts + 1
        runs = [QueryRun(row * count, context - count, count) for row in range(16)]
        yield Case(f"verify 16 x {count} at {context}", runs, bucket(16 * count), 512)
    for prompt in prompts:
        yield Case(f"prefill {prompt}", [QueryRun(0, 0, prompt)], bucket(prompt), 0)


class Timed:
    """A case on the device: queries, pages, and as many page tables as the pool has room for."""

    def __init__(
        self, heads: Heads, case: Case, backend: AttentionBackend, page_size: int, pool_bytes: int = POOL_BYTES
    ):
        random = np.random.default_rng(0)
        slots = len(case.runs)
        pages = max(-(-(run.start + run.count) // page_size) for run in case.runs)
        page_bytes = 4 * heads.kv_heads * page_size * heads.head_dim
        self.tables = max(pool_bytes // (slots * pages * page_bytes), 1)
        # Beyond that a page is in several tables, or several times in one: far apart, not found in a cache.
        num_pages = min(self.tables * slots * pages, MOST_BYTES // page_bytes)
        shape = num_pages, 2, heads.kv_heads, page_size, heads.head_dim
        self.pages = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(jax.random.key(0))
        queries = random.standard_normal((case.tokens, heads.kv_heads * heads.group, heads.head_dim))
        self.q = jnp.asarray(queries, jnp.bfloat16)
        order = np.resize(random.permutation(num_pages).astype(np.int32), (self.tables, slots, pages))
        slot, position = np.full(case.tokens, slots, np.int32), np.full(case.tokens, -1, np.int32)
        for index, run in enumerate(case.runs):
            slot[run.row : run.row + run.count] = index
            position[run.row : run.row + run.count] = run.start + np.arange(run.count)
        work = pack_runs(backend.work, case.runs, case.tokens)
        prepare = jax.jit(
            lambda work, table, slot, position: backend.prepare(
                backend.work.unpack(work, case.tokens), table, slot, position, num_pages=num_pages, page_size=page_size
            )
        )
        self.prepared = [prepare(work, jnp.asarray(table), slot, position) for table in order]
        self.attend = jax.jit(partial(backend.attend, scale=heads.head_dim**-0.5))

    def seconds(self, repeats: int = 20) -> float:
        """Of one call, from the least of three series of calls that the device works off one after the other."""
        self.attend(self.q, self.pages, self.prepared[0]).block_until_ready()
        return min(self._series(repeats) for _ in range(3)) / repeats

    def _series(self, repeats: int) -> float:
        started = time.perf_counter()
        for index in range(repeats):
            out = self.attend(self.q, self.pages, self.prepared[index % self.tables])
        out.block_until_ready()
        return time.perf_counter() - started


def table(
    heads: Heads, chosen: list[Case], backends: dict[str, Callable[[Case], AttentionBackend]], page_size: int
) -> Iterator[str]:
    """The lines of the table, as they are measured."""
    columns = "".join(f" {name + ' µs':>11} {'GB/s':>6} {'TF/s':>6} {'floor':>6}" for name in backends)
    yield f"{'one layer':<22} {'MB':>9} {'GFLOP':>9} {'floor µs':>9}" + columns
    for case in chosen:
        of = cost(heads, case.runs, case.split)
        line = f"{case.name:<22} {of.bytes / 1e6:9.2f} {of.operations / 1e9:9.2f} {of.floor * 1e6:9.1f}"
        for backend in backends.values():
            took = Timed(heads, case, backend(case), page_size).seconds()
            rates = of.bytes / took / 1e9, of.operations / took / 1e12
            line += f" {took * 1e6:11.1f} {rates[0]:6.0f} {rates[1]:6.1f} {of.floor / took:6.0%}"
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--contexts", nargs="*", type=int, default=[512, 4096, 32768])
    parser.add_argument("--prompts", nargs="*", type=int, default=[512, 4096, 16384])
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--backends", nargs="*", default=["mosaic"], choices=["mosaic", "xla"])
    options = parser.parse_args()
    heads = Heads(options.kv_heads, options.group, options.head_dim)
    choose = lambda name, case: choose_attention(
        name,
        head_dim=heads.head_dim,
        group=heads.group,
        max_model_len=max(run.start + run.count for run in case.runs),
    )
    on_gpu = jax.default_backend() == "gpu"
    backends = {name: partial(choose, name) for name in options.backends} if on_gpu else {}
    for line in table(
        heads,
        list(cases(options.batches, options.contexts, options.prompts, options.drafts)),
        backends,
        options.page_size,
    ):
        print(line, flush=True)


if __name__ == "__main__":
    main()
