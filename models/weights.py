"""From stored tensors, named as Hugging Face names them, to a filled Decoder. Reads no files.

A loader says which tensors it has (`check_tensors`, before any device memory is taken) and hands over a
function that reads one by name (`build_decoder`); the tables of `registry.py` say what becomes of them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.config import CheckpointError, ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.registry import FAMILIES, Fuse, Source
from jaxserve.models.sharding import check_mesh, parameter_sharding

# What `fuse_tensors` makes of stored tensors has a number: converted trees are kept by it (checkpoint/orbax.py).
LAYOUT = 1

# Buffers that older versions of transformers stored; the frequencies come from config.json.
JUNK = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


@lru_cache(maxsize=8)  # a second or so for a deep model, and needed for checking as for loading
def abstract_decoder(config: ModelConfig) -> Decoder:
    """The decoder's structure and shapes, without arrays (its dtypes mean nothing); not to be changed."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=None))


class Leaf(NamedTuple):
    """One parameter: its dotted path, shape, and the stored tensors (with their shapes) that make it."""

    path: str
    shape: tuple[int, ...]
    fuse: Fuse
    tensors: dict[str, tuple[int, ...]]


def decoder_leaves(config: ModelConfig) -> list[Leaf]:
    """Every parameter of the model, in the order of `jax.tree.leaves(nnx.state(decoder))`."""
    table = FAMILIES[config.architecture].weights

    def source(path: str) -> Source:
        generic, index = re.sub(r"^layers\.\d+", "layers.{i}", path), re.search(r"\d+|$", path)
        found = table[generic]
        return found._replace(names=tuple(name.format(i=index[0]) for name in found.names))

    return leaves_of(abstract_decoder(config), source, config)


def leaves_of(module: nnx.Module, source: Callable[[str], Source], config: ModelConfig | None) -> list[Leaf]:
    """Every array of a module, in the order of its state; `source` says of a path which tensors make it.

    `config` is that of the attention heads, None where there is no attention.
    """
    leaves = []
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(nnx.state(module))[0]:
        path = ".".join(str(key.key) for key in key_path if isinstance(key, jax.tree_util.DictKey))
        names, fuse = source(path)
        shapes = stored_shapes(fuse, leaf.shape, config)
        leaves.append(Leaf(path, leaf.shape, fuse, dict(zip(names, shapes, strict=True))))
    return leaves


def stored_shapes(fuse: Fuse, shape: tuple[int, ...], config: ModelConfig | None) -> tuple[tuple[int, ...], ...]:
    """The shapes in the file of the tensors behind a parameter of this shape."""
    q, kv = (0, 0) if config is None else (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
    match fuse:
        case Fuse.COPY:
            return (shape,)
        case Fuse.TRANSPOSE:
            return (shape[::-1],)
        case Fuse.QKV:
            return ((q, shape[0]), (kv, shape[0]), (kv, shape[0]))
        case Fuse.QKV_BIAS:
            return ((q,), (kv,), (kv,))
        case Fuse.OUT:
            return ((shape[2], q),)
        case Fuse.GATE_UP:
            return ((shape[2], shape[0]),) * 2
        case Fuse.GATE_UP_BIAS:
            return (shape[1:],) * 2


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and stored shape of every tensor that this model is made of."""
    return {name: shape for leaf in decoder_leaves(config) for name, shape in leaf.tensors.items()}


def check_tensors(config: ModelConfig, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """CheckpointError unless the names are exactly those the model needs (JUNK aside) and the shapes fit."""
    check_names(tensor_shapes(config), found, where, f"{config.architecture} as config.json describes it")


def check_names(
    needed: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], where: str, what: str
) -> None:
    """CheckpointError unless the found tensors are the needed ones (JUNK aside), in names and shapes."""
    missing = sorted(needed.keys() - found.keys())
    unused = sorted(name for name in found.keys() - needed.keys() if not JUNK.search(name))
    if missing or unused:
        raise CheckpointError(
            f"{where}: the tensors do not fit {what}; "
            f"missing: {_listed(missing)}; not used by the model: {_listed(unused)}"
        )
    for name, shape in needed.items():
        if tuple(found[name]) != shape:
            raise CheckpointError(
                f"{where}: tensor {name!r} has shape {list(found[name])}, but config.json asks for {list(shape)}"
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:20]) or "none"
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def fuse_tensors(fuse: Fuse, tensors: list[np.ndarray], config: ModelConfig | None) -> np.ndarray:
    """One parameter from its stored tensors, on the host. May return a view. `config` as `leaves_of` takes it."""
    match fuse:
        case Fuse.QKV | Fuse.QKV_BIAS:
            grouped = [t.reshape(config.num_kv_heads, -1, *t.shape[1:]) for t in tensors]
            joined = np.concatenate(grouped, axis=1)
            return joined if fuse is Fuse.QKV_BIAS else joined.transpose(2, 0, 1)
        case Fuse.OUT:
            return tensors[0].T.reshape(config.num_kv_heads, config.q_per_group * config.head_dim, -1)
        case Fuse.GATE_UP:
            return np.stack(tensors).transpose(2, 0, 1)
        case Fuse.GATE_UP_BIAS:
            return np.stack(tensors)
        case Fuse.TRANSPOSE:
            return tensors[0].T
    return tensors[0]


def build_decoder(
    config: ModelConfig, *, dtype, read: Callable[[str], np.ndarray], mesh: jax.sharding.Mesh | None = None
) -> Decoder:
    """A Decoder filled leaf by leaf: read, fused and cast on the host, then copied to the device once.

    Only one leaf's host copy lives at a time. With a mesh every leaf gets its sharding (see `sharding.py`).
    """

    def fused(leaf: Leaf) -> np.ndarray:
        # Cast before transposing: NumPy casts strided memory six times slower.
        tensors = [np.asarray(read(name)).astype(dtype, copy=False) for name in leaf.tensors]
        return fuse_tensors(leaf.fuse, tensors, config)

    if mesh is not None:
        check_mesh(config, mesh)
    return _fill(config, dtype, fused, mesh)


def assemble(config: ModelConfig, arrays: Sequence[jax.Array]) -> Decoder:
    """The decoder of these parameters, given in the order of `decoder_leaves` and of its shapes."""
    graphdef, state = nnx.split(abstract_decoder(config))
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), arrays))


def _fill(config: ModelConfig, dtype, value: Callable[[Leaf], np.ndarray], mesh: jax.sharding.Mesh | None) -> Decoder:
    arrays = []
    for leaf in decoder_leaves(config):
        # A fresh array, never a view of a file: on the CPU JAX may keep it as the device's own copy.
        host = np.array(value(leaf), dtype=dtype, order="C", copy=True)
        if host.shape != leaf.shape:
            tensors = ", ".join(leaf.tensors)
            raise CheckpointError(f"{tensors}: shape {host.shape} instead of {leaf.shape} for {leaf.path}")
        arrays.append(jax.device_put(host, None if mesh is None else parameter_sharding(mesh, leaf.path)))
    return assemble(config, arrays)


def random_decoder(config: ModelConfig, seed: int = 0, dtype=jnp.float32) -> Decoder:
    """A decoder for tests and benchmarks: every norm and bias matters, logits have a deviation of about 1.

    The values come from NumPy: the same under any setting of JAX, and nothing is compiled.
    """
    generator = np.random.default_rng(seed)

    def fill(leaf: Leaf) -> np.ndarray:
        noise = generator.standard_normal(leaf.shape, dtype=np.float32)
        kind = leaf.path.rpartition(".")[2]
        if kind == "scale":
            return 1 + 0.2 * noise
        if kind.endswith("bias"):
            return 0.2 * noise
        fan_in = {"embed": config.hidden_size, "out": leaf.shape[0] * leaf.shape[-2]}.get(kind, leaf.shape[0])
        return noise / np.float32(np.sqrt(fan_in))

    return _fill(config, dtype, fill, None)
