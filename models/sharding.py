"""How each parameter is split over a mesh: by KV heads in attention, by ffn columns in the MLP."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.models.config import ModelConfig

AXIS = "model"

_SPECS = {
    "embed": P(),
    "head": P(),
    "scale": P(),
    "qkv": P(None, AXIS, None),
    "qkv_bias": P(AXIS, None),
    "out": P(AXIS, None, None),
    "out_bias": P(),
    "gate_up": P(None, None, AXIS),
    "gate_up_bias": P(None, AXIS),
    "down": P(AXIS, None),
    "down_bias": P(),
}


def partition_spec(path: str) -> P:
    """The spec of a parameter by its dotted path, e.g. `layers.3.qkv`. ValueError for an unknown one."""
    leaf = path.rpartition(".")[2]
    if leaf not in _SPECS:
        raise ValueError(f"no partition spec for the parameter {path!r}; known leaves: {', '.join(_SPECS)}")
    return _SPECS[leaf]


def parameter_sharding(mesh: jax.sharding.Mesh, path: str) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(path))


def check_mesh(config: ModelConfig, mesh: jax.sharding.Mesh) -> None:
    """ValueError unless the mesh has the axis `model` and its size divides what is split over it."""
    if AXIS not in mesh.shape:
        raise ValueError(f"mesh axes {tuple(mesh.axis_names)} lack the axis {AXIS!r}")
    size = mesh.shape[AXIS]
    for name, value in (
        ("num_key_value_heads", config.num_kv_heads),
        ("intermediate_size", config.intermediate_size),
    ):
        if value % size:
            raise ValueError(f"mesh axis {AXIS!r} of size {size} does not divide {name}={value}")
