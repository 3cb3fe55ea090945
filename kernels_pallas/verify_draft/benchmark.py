"""Sampling and verification by shape, beside their floors: `python -m jaxserve.kernels_pallas.verify_draft.benchmark`

Two floors on an H200: the logits' bytes at the data sheet's bandwidth, and the instructions at one per lane and clock
on the multiprocessors that have a row. Passes are those of `mosaic.py` where the first winner is kept. On a Hopper GPU
the kernel is timed, elsewhere the reference; both are printed beside the kernel's floors.
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels_pallas.hopper import SMS
from jaxserve.kernels_pallas.roofline import HBM_BYTES_PER_S
from jaxserve.kernels_pallas.verify_draft import DraftRows, choose_verify
from jaxserve.kernels_pallas.verify_draft.sampler import SamplingRows

CLOCK_HZ = 1.98e9
LANES_PER_SM = 128  # 32-bit instructions a clock


class Kind(NamedTuple):
    """What all rows ask for; passes over the target's and the draft's logits; instructions for a token in all of them
    (of the PTX for an H200, a division as ten)."""

    parameters: dict
    passes: int
    instructions: int


KINDS = {
    "greedy": Kind({"temperature": 0.0}, 1, 6),
    "sampled": Kind({}, 2, 6 + 100),
    "top_p 0.95": Kind({"top_p": 0.95}, 3, 6 + 2 * 130),
}


class Shape(NamedTuple):
    rows: int
    width: int  # 1 is plain sampling
    vocab: int


def floors(shape: Shape, kind: Kind) -> tuple[int, float, float]:
    """Bytes read, and the microseconds that bytes and instructions take on an H200."""
    positions = shape.rows * shape.width
    tokens = positions * shape.vocab
    bytes_read = 4 * tokens * kind.passes
    waves = -(-positions // SMS)
    instructions = shape.vocab * kind.instructions * waves / (LANES_PER_SM * CLOCK_HZ)
    return bytes_read, 1e6 * bytes_read / HBM_BYTES_PER_S, 1e6 * instructions


def arguments(shape: Shape, kind: Kind) -> tuple:
    """Of `verify_draft`, made on the device: logits as flat as those of a random model, drafts that rarely stand."""
    count, width, vocab = shape
    positions = count * width
    normal = jax.jit(lambda: 3 * jax.random.normal(jax.random.key(0), (positions, vocab), jnp.float32))
    rng = np.random.default_rng(0)
    rows = SamplingRows(
        temperature=jnp.full(positions, kind.parameters.get("temperature", 1.0), jnp.float32),
        top_k=jnp.zeros(positions, jnp.int32),
        top_p=jnp.full(positions, kind.parameters.get("top_p", 1.0), jnp.float32),
        min_p=jnp.zeros(positions, jnp.float32),
        seed=jnp.asarray(rng.integers(0, 2**32, (positions, 2), np.uint32)),
        wants_logprobs=jnp.full(positions, -1, jnp.int32),
    )
    at = jnp.arange(positions, dtype=jnp.int32)
    tokens = jnp.asarray(rng.integers(0, vocab, positions), jnp.int32)
    return normal(), rows, at, DraftRows(at % width, tokens, jnp.ones(positions, bool))


def measure(call: Callable, given: tuple, repeats: int) -> float:
    """Microseconds of one call among others that the device works off one after the other; the best of three series."""
    jax.block_until_ready(call(*given))
    best = float("inf")
    for _ in range(3 if repeats > 1 else 1):
        started = time.perf_counter()
        for _ in range(repeats):
            result = call(*given)
        jax.block_until_ready(result)
        best = min(best, time.perf_counter() - started)
    return 1e6 * best / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="*", default=[49152, 128256])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--width", type=int, nargs="*", default=[1, 4], help="drafts of a row, and one")
    parser.add_argument("--repeats", type=int, default=20, help="0 prints the floors only")
    options = parser.parse_args()
    backend = choose_verify()
    print(f"{jax.local_devices()[0].device_kind}, {backend.name}; microseconds")
    print(
        f"{'rows':>5} {'width':>5} {'vocab':>7} {'kind':<11} {'MB read':>8} {'bytes':>8} {'instr.':>8} {'measured':>9}"
    )
    call = jax.jit(backend.verify_draft)
    for vocab in options.vocab:
        for shape in (Shape(rows, width, vocab) for rows in options.rows for width in options.width):
            for name, kind in KINDS.items():
                bytes_read, by_bytes, by_instructions = floors(shape, kind)
                took = ""
                if options.repeats:
                    took = f"{measure(call, arguments(shape, kind), options.repeats):9.0f}"
                line = f"{shape.rows:>5} {shape.width:>5} {vocab:>7} {name:<11} {bytes_read / 1e6:8.1f}"
                print(f"{line} {by_bytes:8.1f} {by_instructions:8.1f} {took}", flush=True)


if __name__ == "__main__":
    main()
