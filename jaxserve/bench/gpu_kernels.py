"""Sections of `gpu_check` about one kernel each."""

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.gpu_sizes import Sizes
from jaxserve.bench.report import Report
from jaxserve.kernels_pallas.hopper import Interpret, interpreted
from jaxserve.kernels_pallas.matmul import benchmark
from jaxserve.kernels_pallas.matmul.mosaic import matmul
from jaxserve.kernels_pallas.matmul.reference import matmul_reference
from jaxserve.kernels_pallas.roofline import BF16_FLOP_PER_S, HBM_BYTES_PER_S, matmul_cost


def interpretation(sizes: Sizes) -> Interpret:
    """The `interpret` of our kernels."""
    return interpreted(detect_races=False) if sizes.interpret else None


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Of one call, with calls following each other as in an engine; the best of three rounds."""
    jax.block_until_ready(call())  # compiles
    best = float("inf")
    for _ in range(3 if repeats > 1 else 1):
        started = time.perf_counter()
        for _ in range(repeats):
            result = call()
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - started) / repeats)
    return best


def random(seed: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    """Normal values, made on the device."""
    return _normal(shape, jnp.dtype(dtype))(jnp.uint32(seed))


@cache
def _normal(shape, dtype):
    return jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), shape, dtype))


# ---- what the device reaches ----------------------------------------------------------------------------


def ceilings(report: Report, sizes: Sizes) -> None:
    """Bytes per second of a copy, operations per second of a large product by the vendor's library."""
    source = jnp.zeros(sizes.copy_bytes // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    rate = 2 * source.nbytes / seconds(lambda: copy(source), sizes.repeats)
    report.add("copy (read + write)", rate / 1e12, "TB/s", share=rate / HBM_BYTES_PER_S)
    a, b = random(0, sizes.square, sizes.square), random(1, sizes.square, sizes.square)
    product = jax.jit(jnp.dot)
    rate = 2 * sizes.square**3 / seconds(lambda: product(a, b), sizes.repeats)
    report.add(f"product of {sizes.square}", rate / 1e12, "TFLOP/s", share=rate / BF16_FLOP_PER_S)


# ---- products -------------------------------------------------------------------------------------------


def product_numbers(report: Report, sizes: Sizes) -> None:
    """Against float64, with the error that float32 accumulation and one rounding may make."""
    ours = jax.jit(partial(matmul, interpret=interpretation(sizes)), static_argnums=2)
    for inner, columns in sizes.products[:2]:
        for rows in sizes.rows[:2]:
            x, weight = random(2, rows, inner), random(3, inner, columns)
            wide = [np.asarray(value, np.float64) for value in (x, weight)]
            exact, magnitude = wide[0] @ wide[1], np.abs(wide[0]) @ np.abs(wide[1])
            for dtype, unit in (("float32", 2.0**-24), ("bfloat16", 2.0**-8)):
                error = np.abs(np.asarray(ours(x, weight, dtype), np.float64) - exact)
                # Tensor cores may drop bits below those of an accumulator: twice the bound of rounded additions.
                allowed = 2 * inner * 2.0**-24 * magnitude + unit * np.abs(exact)
                name = f"[{rows}, {inner}] x [{inner}, {columns}] {dtype}: largest error / allowed"
                worst = float((error / allowed).max())
                report.add(name, worst, ok=worst <= 1)


def product_bits(report: Report, sizes: Sizes) -> None:
    """Whether a row has the same bits in every bucket, in float32, where every bit of the accumulator shows."""
    ours = jax.jit(partial(matmul, out_dtype=jnp.float32, interpret=interpretation(sizes)))
    for inner, columns in sizes.products:
        x, weight = random(4, sizes.rows[-1], inner), random(5, inner, columns)
        most = ours(x, weight)
        for rows in sizes.rows[:-1]:
            same = bool((ours(x[:rows], weight) == most[:rows]).all())
            report.add(
                f"[{inner}, {columns}] {rows} against {sizes.rows[-1]} rows", "same bits" if same else "differ", ok=same
            )


def product_speed(report: Report, sizes: Sizes) -> None:
    """Ours, of one order along K, beside what XLA is free to choose; the share is that of the floor."""
    ours = partial(matmul, interpret=interpretation(sizes))
    cold = {"cold_bytes": 0} if sizes.interpret else {}
    for inner, columns in sizes.products:
        for rows in sizes.timed_rows:
            if not report.has_time(f"[{rows}, {inner}] x [{inner}, {columns}]"):
                continue
            floor = matmul_cost(rows, inner, columns).floor
            for name, product in (("mosaic", ours), ("xla", matmul_reference)):
                took = benchmark.seconds(product, rows, inner, columns, repeats=sizes.repeats, **cold)
                report.add(f"{name} [{rows}, {inner}] x [{inner}, {columns}]", took * 1e6, "us", share=floor / took)


CORRECTNESS = {"product numbers": product_numbers, "product bits": product_bits}
SPEED = {"product speed": product_speed}
