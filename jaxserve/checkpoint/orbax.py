"""The converted tree in Orbax's format: the Decoder's parameters, fused as the engine runs them.

    folder/                config.json, tokenizer files, generation_config.json
    folder/orbax/          the tree, named by the parameters' paths (`layers.0.qkv` is tree["layers"]["0"]["qkv"])
    folder/orbax/jaxserve.json    its key: model, dtype and layout

Arrays are stored whole, so a tree can be restored onto any mesh. Orbax is imported when it is needed.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from jaxserve.checkpoint.hugging_face import dtype_of, parse_json, read_config
from jaxserve.models.config import DTYPES, CheckpointError, ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.sharding import check_mesh, parameter_sharding
from jaxserve.models.weights import LAYOUT, assemble, decoder_leaves

_TREE, _KEY = "orbax", "jaxserve.json"


def holds_orbax(folder: Path) -> bool:
    """Whether `save_orbax` has written a tree into this folder."""
    return (folder / _TREE / _KEY).is_file()


def save_orbax(decoder: Decoder, folder: Path) -> None:
    """Write the decoder's parameters to `folder/orbax`, which must not exist, in their own dtype."""
    import orbax.checkpoint as ocp

    values = jax.tree.leaves(nnx.state(decoder))
    # NumPy arrays, so that Orbax does not record on which devices they are.
    tree = {leaf.path: np.asarray(value) for leaf, value in zip(decoder_leaves(decoder.config), values, strict=True)}
    path = folder.absolute() / _TREE
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, traverse_util.unflatten_dict(tree, sep="."))
        checkpointer.wait_until_finished()
    key = {"model": decoder.config.architecture, "dtype": values[0].dtype.name, "layout": LAYOUT}
    (path / _KEY).write_text(json.dumps(key, indent=2) + "\n")


def load_orbax(
    folder: Path,
    *,
    dtype: Any = None,
    max_model_len: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Decoder:
    """Restores the tree of `folder` in `dtype` (None: what config.json says), directly onto `mesh` if one is given.

    Another dtype than the stored one is cast to while restoring, rounded to nearest even like everywhere.
    Raises CheckpointError where key, config.json and tree do not fit each other; nothing is on a device then.
    """
    config = read_config(folder, max_model_len=max_model_len)
    dtype = dtype_of(config) if dtype is None else jnp.dtype(dtype)
    path = folder.absolute() / _TREE
    stored = _checked_key(path / _KEY, config)
    if mesh is not None:
        check_mesh(config, mesh)
    leaves = decoder_leaves(config)
    one_device = jax.device_put(np.int32(0)).sharding  # without a mesh: wherever JAX puts an array now
    target = {}
    for leaf in leaves:
        sharding = one_device if mesh is None else parameter_sharding(mesh, leaf.path)
        target[leaf.path] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)
    arrays = _restore(path, target, stored)
    if dtype == jnp.float16 and stored != "float16":
        for name, array in arrays.items():
            if jnp.isinf(array).any():
                rule = f"cannot hold the parameter {name!r}; use bfloat16 or float32"
                raise CheckpointError(f"{path}: dtype='float16' {rule}")
    return assemble(config, [arrays[leaf.path] for leaf in leaves])


def _restore(path: Path, target: dict[str, jax.ShapeDtypeStruct], stored_dtype: str) -> dict[str, jax.Array]:
    """The arrays of a tree by their dotted paths, cast and placed as `target` says, after a check of what is there."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(path).item_metadata
        if metadata is None:  # which is how Orbax says that something about it is damaged
            raise CheckpointError(f"{path}: Orbax cannot read the tree; convert the original model again")
        _check_tree(path, traverse_util.flatten_dict(metadata.tree, sep="."), target, stored_dtype)
        try:
            tree = checkpointer.restore(path, traverse_util.unflatten_dict(target, sep="."))
        except Exception as error:  # Orbax raises bare Exceptions, with many lines of its database's own
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"{path}: Orbax cannot read the tree: {reason:.200}") from error
    return traverse_util.flatten_dict(tree, sep=".")


def _checked_key(file: Path, config: ModelConfig) -> str:
    """The dtype that the tree is stored in; CheckpointError unless this version can read it as this model."""
    key = parse_json(file.read_bytes(), file)
    if key.get("layout") != LAYOUT:
        raise CheckpointError(
            f"{file}: layout={key.get('layout')!r}, but this version of jaxserve reads layout {LAYOUT}; "
            "convert the original model again with `jaxserve convert`"
        )
    if key.get("model") != config.architecture:
        raise CheckpointError(f"{file}: model={key.get('model')!r}, but config.json describes {config.architecture!r}")
    if key.get("dtype") not in DTYPES:
        raise CheckpointError(f"{file}: dtype={key.get('dtype')!r}, but it must be one of {', '.join(DTYPES)}")
    return key["dtype"]


def _check_tree(path: Path, found: dict[str, Any], target: dict[str, jax.ShapeDtypeStruct], dtype: str) -> None:
    needed = {name: array.shape for name, array in target.items()}
    if wrong := sorted(found.keys() ^ needed.keys()):
        state = "is missing" if wrong[0] in needed else "is not used by the model"
        raise CheckpointError(f"{path}: the tree does not fit config.json: the parameter {wrong[0]!r} {state}")
    for name, shape in needed.items():
        array = found[name]
        if tuple(array.shape) != shape:
            raise CheckpointError(
                f"{path}: parameter {name!r} has shape {list(array.shape)}, but config.json asks for {list(shape)}"
            )
        if jnp.dtype(array.dtype).name != dtype:
            raise CheckpointError(f"{path}: parameter {name!r} is stored as {array.dtype}, but {_KEY} says {dtype}")
