"""Rotary position embeddings: frequencies on the host, tables of cosines and sines on the device.

Follows `transformers.modeling_rope_utils`, in its arithmetic (float32) too. `dynamic` differs in one way:
there the frequencies grow with the sequence seen so far, here they are fixed for the longest one, so that a
token's keys never depend on what follows it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.models.fields import CheckpointError, Fields, UnsupportedModelError, nearest

Frequencies = Float32[np.ndarray, "half_dim"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the frequencies depart from `theta ** (-2 i / dim)`.

    `original_length` is the context length of pretraining, `length` the one that `dynamic` is fixed at;
    `attention_factor` multiplies cosines and sines. A field that `kind` does not use keeps its default.
    """

    kind: str = "default"
    factor: float = 1.0
    original_length: int = 1
    length: int = 1
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def rope_from_hf(
    config: Mapping[str, Any], *, default_theta: float, max_position: int, max_model_len: int | None
) -> tuple[float, RopeScaling]:
    """Reads theta and the scaling from `rope_parameters` (transformers 5) or `rope_scaling` (before).

    `dynamic` is fixed at `max_model_len` tokens, but never at fewer than `max_position`.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    values = config.get(name) or {}
    if not isinstance(values, Mapping):
        raise CheckpointError(f"config.json: {name}={values!r}, but it must be an object or null")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _FREQUENCIES:
        raise UnsupportedModelError(
            f"config.json: {name}: rope_type={kind!r} is not supported{nearest(str(kind), _FREQUENCIES)}; "
            f"known types: {', '.join(_FREQUENCIES)}"
        )
    if (partial := values.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1):
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor={partial!r} is not supported; it must be 1 or absent"
        )
    given = {key: value for key, value in values.items() if value is not None}
    if original := config.get("original_max_position_embeddings"):
        given["original_max_position_embeddings"] = original
    defaults = {"rope_theta": default_theta, "original_max_position_embeddings": max_position}
    fields = Fields(values=given, where=f"config.json: {name}", defaults=defaults)
    length = max(max_model_len or max_position, max_position)
    return fields.number("rope_theta"), _scaling(kind, fields, max_position, length)


def _scaling(kind: str, fields: Fields, max_position: int, length: int) -> RopeScaling:
    if kind == "default":
        return RopeScaling()
    if kind == "yarn":
        return _yarn_from_hf(fields, max_position)
    factor = fields.number("factor")
    if kind == "dynamic":
        return RopeScaling(kind=kind, factor=factor, original_length=max_position, length=length)
    if kind == "linear":
        return RopeScaling(kind=kind, factor=factor)
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if not low < high:
        raise fields.wrong("low_freq_factor", f"below high_freq_factor={high}")
    original_length = fields.integer("original_max_position_embeddings")
    return RopeScaling(
        kind=kind, factor=factor, original_length=original_length, low_freq_factor=low, high_freq_factor=high
    )


def _yarn_from_hf(fields: Fields, max_position: int) -> RopeScaling:
    original_length = fields.integer("original_max_position_embeddings")
    given = fields.values
    defaults = {
        "factor": max_position / original_length,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
    }
    fields = Fields(values=given, where=fields.where, defaults=defaults)
    factor = fields.number("factor")
    if "attention_factor" in given:
        attention_factor = fields.number("attention_factor")
    elif given.get("mscale") and given.get("mscale_all_dim"):
        numerator, denominator = fields.number("mscale"), fields.number("mscale_all_dim")
        attention_factor = _mscale(factor, numerator) / _mscale(factor, denominator)
    else:
        attention_factor = _mscale(factor, 1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_length=original_length,
        beta_fast=fields.number("beta_fast"),
        beta_slow=fields.number("beta_slow"),
        truncate=fields.flag("truncate"),
        attention_factor=attention_factor,
    )


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(theta: float, head_dim: int, scaling: RopeScaling) -> Frequencies:
    """Radians per position of each of the `head_dim / 2` rotated pairs."""
    return _FREQUENCIES[scaling.kind](theta, head_dim, scaling).astype(np.float32)


def _default(theta: float, dim: int, scaling: RopeScaling) -> np.ndarray:
    return np.float32(1) / np.power(np.float32(theta), np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))


def _linear(theta: float, dim: int, scaling: RopeScaling) -> np.ndarray:
    return _default(theta, dim, scaling) / np.float32(scaling.factor)


def _dynamic(theta: float, dim: int, scaling: RopeScaling) -> np.ndarray:
    growth = scaling.factor * scaling.length / scaling.original_length - (scaling.factor - 1)
    return _default(theta * growth ** (dim / (dim - 2)), dim, scaling)


def _llama3(theta: float, dim: int, scaling: RopeScaling) -> np.ndarray:
    frequencies = _default(theta, dim, scaling)
    factor, low, high = scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_length * frequencies / np.float32(2 * math.pi)
    smooth = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    return (1 - smooth) * frequencies / np.float32(factor) + smooth * frequencies


def _yarn(theta: float, dim: int, scaling: RopeScaling) -> np.ndarray:
    """YaRN (arXiv 2309.00071): low frequencies are interpolated, high ones kept, with a ramp between."""

    def pair_with(rotations: float) -> float:
        return dim * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    frequencies = _default(theta, dim, scaling)
    return frequencies / np.float32(scaling.factor) * ramp + frequencies * (1 - ramp)


_FREQUENCIES: Mapping[str, Callable[[float, int, RopeScaling], np.ndarray]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}


def rope_tables(
    positions: Int32[Array, "tokens"], frequencies: Frequencies, attention_factor: float
) -> tuple[Float32[Array, "tokens half_dim"], Float32[Array, "tokens half_dim"]]:
    """Cosines and sines of every position's angles, times `attention_factor`."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
    factor = jnp.float32(attention_factor)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "tokens heads dim"],
    cos: Float32[Array, "tokens half_dim"],
    sin: Float32[Array, "tokens half_dim"],
) -> Float[Array, "tokens heads dim"]:
    """Rotates the pairs (i, i + dim / 2) of every head, in float32 with one rounding at the end."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
