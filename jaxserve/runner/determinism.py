"""Whether a row's bits depend on its company: where that is proven, and a test of it on this machine.

`deterministic` rests on three things: products whose rows do not depend on each other, KV blocks of a fixed size
counted from position 0 (paged attention), and reductions over fixed axes. The first holds by construction for native
products; for XLA's it is a measured property of buckets with at least `smallest_bucket` rows. So it is listed per
backend, dtype and JAX version, and tested at every start. On Hopper attention and products hold it by construction
(`kernels_missing`), on no GPU has it been shown: what is asked for is tested at start, `auto` does not ask.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.cache.kv_cache import LayerKV
from jaxserve.kernels_pallas.matmul import LinearKernel
from jaxserve.kernels_pallas.paged_attention import AttentionBackend
from jaxserve.kernels_pallas.paged_attention.work_list import QueryRun, pack_runs
from jaxserve.models.decoder import rope_tables
from jaxserve.runner.compilation import Compiler, Program
from jaxserve.runner.head import logits_of
from jaxserve.runner.step import StepDefinition, Tokens, layer_step
from jaxserve.runner.weights import Weights

# (backend, dtype) -> fewest rows at which XLA's products keep their bits; JAX versions and largest bucket measured.
SMALLEST_BUCKET = {("cpu", "bfloat16"): 8, ("cpu", "float32"): 64, ("cpu", "float16"): 64}
KERNEL_SMALLEST_BUCKET = 8  # our own products keep them for any number; what is left to XLA was measured from 8 on
PROVEN_JAX = ("0.11.2", "0.12.0")
PROVEN_ROWS = 512


def smallest_bucket(backend: str, dtype: jnp.dtype, *, linear_kernel: bool = False) -> int:
    """Fewest rows of a step in deterministic mode."""
    return KERNEL_SMALLEST_BUCKET if linear_kernel else SMALLEST_BUCKET.get((backend, jnp.dtype(dtype).name), 64)


def unproven(backend: str, dtype: jnp.dtype, largest_bucket: int) -> str | None:
    """Why determinism is not proven for this combination, or None if it is."""
    name = jnp.dtype(dtype).name
    if (backend, name) not in SMALLEST_BUCKET:
        return f"it is not proven for {name} on the backend {backend!r}"
    if not jax.__version__.startswith(PROVEN_JAX):
        return f"it is proven for JAX {' and '.join(PROVEN_JAX)}, not for {jax.__version__}"
    if largest_bucket > PROVEN_ROWS:
        return f"it is proven up to {PROVEN_ROWS} tokens in a step, not for max_num_batched_tokens={largest_bucket}"
    return None


def kernels_missing(attention: AttentionBackend, linear_kernel: LinearKernel | None) -> str | None:
    """Which kernel for Hopper a step on a GPU would do without, or None: then its rows are independent but for what is
    left to XLA (norms, elementwise work), which `row_invariance` looks at."""
    names = {
        "attention_backend": attention.name,
        "linear_backend": "xla" if linear_kernel is None else linear_kernel.name,
    }
    missing = [f"{field} is {name!r}" for field, name in names.items() if name != "mosaic"]
    if missing:
        return f"on a GPU it needs 'mosaic' for attention and for products, but {' and '.join(missing)}"
    return None


def row_invariance(
    step: StepDefinition, weights: Weights, tokens: tuple[int, int], rows: tuple[int, int], compiler: Compiler
) -> str | None:
    """Run one layer and the head on the same rows in the smallest and the largest bucket of each.

    Returns what differs on this machine, or None if nothing does.
    """
    most = max(*tokens, *rows)
    shape = (most, step.model.config.hidden_size)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal(shape, dtype=np.float32), weights.embed.dtype)
    works = [pack_runs(step.attention.work, [QueryRun(row, 0, 1) for row in range(size)], size) for size in tokens]
    function = partial(_compare, step, tokens, rows)
    arguments = (weights.layers[0], weights.head, hidden, works)
    check = compiler.get(Program("row_invariance", most, function, arguments, donate=()))
    for what, same in zip(("layer", "head"), jax.device_get(check(*arguments)), strict=True):
        if not same:
            small, large = tokens if what == "layer" else rows
            return f"a row of the {what} has other bits among {small} rows than among {large} on this machine"
    return None


def _compare(step: StepDefinition, tokens, rows, leaves, head, hidden, works):
    """Whether the rows that both buckets hold agree, for the layer and for the head."""
    small, large = (_run_layer(step, leaves, hidden[:n], work) for n, work in zip(tokens, works, strict=True))
    few, many = (logits_of(head, hidden[:n], step.linear(jnp.int32(n))) for n in rows)
    return (small == large[: tokens[0]]).all(), (few == many[: rows[0]]).all()


def _run_layer(step: StepDefinition, leaves, hidden, packed_work):
    """One layer over `rows` sequences of one token each, every one on a page of its own."""
    config, rows = step.model.config, hidden.shape[0]
    page_size = 16
    pages = jnp.zeros((rows, 2, config.num_kv_heads, page_size, config.head_dim), hidden.dtype)
    each = jnp.arange(rows, dtype=jnp.int32)
    zeros = jnp.zeros(rows, jnp.int32)
    where = Tokens(count=jnp.int32(rows), slot=each, position=zeros, page=each, offset=zeros)
    tables = rope_tables(config, each)
    work = step.attention.work.unpack(packed_work, rows)
    prepared = step.attention.prepare(
        work, each[:, None], where.slot, where.position, num_pages=rows, page_size=page_size
    )
    definition = step.model.layers[0]
    return layer_step(definition, step, leaves, hidden, tables, LayerKV(pages), where, prepared)[0]
