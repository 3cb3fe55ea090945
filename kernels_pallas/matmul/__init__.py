"""The products of a model by the names of `config.LINEAR_BACKENDS`: x [rows, in] @ weight [in, *out].

`xla` is what the compiler makes of `models.decoder.linear`; `native` is C++ for CPUs (`cpu/linear.py`); `mosaic` is
for Hopper (`mosaic.py`). The last two give a row the same bits for every number of rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.kernels_pallas.capability import why_no_hopper
from jaxserve.kernels_pallas.cpu.library import Unavailable, load_native
from jaxserve.kernels_pallas.cpu.linear import NativeLinear, has_bfloat16_tiles


@dataclass(frozen=True)  # tuples of different types would be equal: no program may be mistaken for another
class MosaicLinear:
    """The product of `mosaic.py`, as a layer calls it."""

    interpret: Any = None
    name = "mosaic"

    def __call__(
        self, x: Float[Array, "tokens in"], weight: Float[Array, "in ..."], out_dtype=None, *, count: Int[Array, ""]
    ) -> Array:
        """x @ weight [tokens, ...] with float32 accumulation, in `out_dtype` (None: as x); every row is computed."""
        from jaxserve.kernels_pallas.matmul.mosaic import matmul  # Mosaic is imported where it is used

        product = matmul(x, weight.reshape(weight.shape[0], -1), out_dtype, interpret=self.interpret)
        return product.reshape(x.shape[0], *weight.shape[1:])


LinearKernel = NativeLinear | MosaicLinear


def choose_linear(
    backend: str,
    dtype: jnp.dtype,
    mesh: jax.sharding.Mesh | None = None,
    *,
    products: Mapping[str, tuple[int, int]] | None = None,
    deterministic: bool = False,
    device: Any = None,
) -> LinearKernel | None:
    """The product behind a name of `config.LINEAR_BACKENDS`; None is XLA's own.

    `products` are the model's (`ModelConfig.products`), `device` is the first unless given. `auto`, on one device: on a
    CPU native where the library builds, but for bfloat16 where the CPU has AMX; on Hopper mosaic if results must be
    `deterministic`. ValueError if a backend is asked for where it cannot be had.
    """
    if backend == "xla":
        return None
    device = device or jax.local_devices()[0]
    if backend == "auto":
        backend = "mosaic" if device.platform == "gpu" else "native"
        if mesh is not None or (device.platform == "gpu" and not deterministic):
            return None
        if backend == "native" and dtype == jnp.bfloat16 and has_bfloat16_tiles():
            return None
        found = _find(backend, dtype, mesh, products, device)
        return None if isinstance(found, str) else found
    found = _find(backend, dtype, mesh, products, device)
    if isinstance(found, str):
        raise ValueError(f"linear_backend={backend!r}: linear_backend must be one that works here: {found}")
    return found


def why_no_mosaic(
    dtype: jnp.dtype,
    mesh: jax.sharding.Mesh | None = None,
    *,
    products: Mapping[str, tuple[int, int]] | None = None,
    device: Any = None,
) -> str | None:
    """Why `mosaic` cannot be had for such products here, or None if it can."""
    found = _find("mosaic", dtype, mesh, products, device or jax.local_devices()[0])
    return found if isinstance(found, str) else None


def _find(backend: str, dtype, mesh, products, device) -> LinearKernel | str:
    """A kernel, or why there is none."""
    if mesh is not None:
        return "it runs on one device, not on a mesh"
    if backend == "native":
        library = load_native()
        return library.reason if isinstance(library, Unavailable) else NativeLinear(library.linear)
    if reason := why_no_hopper(device):
        return reason
    from jaxserve.kernels_pallas.matmul.mosaic import ROW_MULTIPLE, unsupported

    for name, (inner, columns) in (products or {}).items():
        if reason := unsupported(ROW_MULTIPLE, inner, columns, dtype):
            return f"{name}: {reason}"
    return MosaicLinear()
