"""Weights from a Flax NNX model: taken over at start, replaced between two steps. Who owns which array is said here.

The engine holds arrays of its own (`copy=True`): a training step that donates its parameters deletes none of the
engine's, and the engine deletes none of the trainer's. With `copy=False` an array that has the engine's dtype and
place already is shared: the caller promises neither to donate nor to delete it while the engine lives.

Each old array is let go as soon as its successor is there, so an update needs the memory of one more parameter, not
of a second model, and leaves none behind.
"""

from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.sharding import parameter_sharding
from jaxserve.models.weights import assemble, decoder_leaves
from jaxserve.runner.weights import Weights, parameter_names, tied_head
from jaxserve.validation import is_integer, require

RUNNING = ("recompute", "keep")


@no_type_check  # it checks itself: the tests' type checker would come first with another error
def named_parameters(params: Any, config: ModelConfig) -> dict[str, Any]:
    """The arrays of a Decoder, its state or a tree of the same structure, by dotted path, in the model's order.

    ValueError naming the first parameter that is missing, deleted, or has another shape or no float dtype.
    """
    given = _by_path(params)
    leaves = decoder_leaves(config)
    for leaf in leaves:
        if leaf.path not in given:
            raise ValueError(f"params: {leaf.path!r} is missing")
        value = given[leaf.path]
        if not isinstance(value, jax.Array | np.ndarray) or isinstance(value, jax.core.Tracer):
            raise ValueError(f"params: {leaf.path!r} is a {type(value).__name__}: it must be an array with values")
        if value.shape != leaf.shape:
            shapes = f"{list(value.shape)}: it must have {list(leaf.shape)}"
            raise ValueError(f"params: {leaf.path!r} has shape {shapes}")
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"params: {leaf.path!r} has dtype {value.dtype}: it must have a float dtype")
        if isinstance(value, jax.Array) and value.is_deleted():
            raise ValueError(f"params: {leaf.path!r} is deleted (donated to another computation?)")
    known = {leaf.path for leaf in leaves}
    for path in given:
        if path not in known:
            raise ValueError(f"params: {path!r} is no parameter of this model")
    return {leaf.path: given[leaf.path] for leaf in leaves}


def host_parameters(params: Any) -> dict[str, np.ndarray]:
    """The arrays by dotted path as NumPy arrays: `update_params` takes this, too. Nothing is checked."""
    return {path: np.asarray(leaf) for path, leaf in _by_path(params).items()}


def _by_path(params: Any) -> dict[str, Any]:
    if isinstance(params, nnx.Module):
        params = nnx.state(params)
    return {_dotted(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}


def _dotted(path: tuple) -> str:
    parts = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path]
    if parts and parts[-1] == "value":  # the array inside an nnx.Variable
        parts.pop()
    return ".".join(map(str, parts))


def own_decoder(model: Decoder, *, dtype, mesh: jax.sharding.Mesh | None, copy: bool) -> Decoder:
    """The model as the engine holds it: cast to `dtype`, on the engine's device or split over its mesh."""
    dtype = jnp.dtype(dtype)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    arrays = [
        _placed(value, dtype, device if mesh is None else parameter_sharding(mesh, path), copy)
        for path, value in named_parameters(model, model.config).items()
    ]
    return assemble(model.config, jax.block_until_ready(arrays))


def replaced(weights: list[Weights], config: ModelConfig, params: dict[str, Any], *, copy: bool) -> Weights:
    """New weights with dtypes and places of the old ones, which the caller hands over as the only item of a list.

    `params` is what `named_parameters` returned. Returns when all copies are done.
    """
    old = weights.pop()
    draft, old = old.draft, old._replace(draft=None)  # a draft model keeps its own
    leaves, structure = jax.tree.flatten(old)
    del old
    for index, path in enumerate(jax.tree.leaves(parameter_names(config))):
        dtype, sharding = leaves[index].dtype, leaves[index].sharding
        leaves[index] = _placed(params[path], dtype, sharding, copy)
    if config.tie_word_embeddings:
        sharding = leaves[-1].sharding
        leaves[-1] = jax.device_put(tied_head(leaves[0]), sharding)
    return jax.tree.unflatten(structure, jax.block_until_ready(leaves))._replace(draft=draft)


def _placed(value: Any, dtype, sharding: jax.sharding.Sharding, copy: bool) -> jax.Array:
    """The value in this dtype and place; with `copy` never the caller's own buffer."""
    if value.dtype != dtype:
        value, copy = value.astype(dtype), False
    elif copy and isinstance(value, np.ndarray):  # `may_alias` says nothing about the host's memory
        value, copy = value.copy(), False
    return jax.device_put(value, sharding, may_alias=False if copy else None)


@no_type_check
def check_options(running: str, version: int | None) -> None:
    """ValueError for options of `update_params` that break a rule."""
    require(running in RUNNING, "running", running, f"one of {', '.join(map(repr, RUNNING))}")
    valid = version is None or (is_integer(version) and version >= 0)
    require(valid, "version", version, "None or an integer of at least 0")
