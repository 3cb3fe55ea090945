"""Draft heads: what guesses a target's next tokens from its hidden states. Their kinds: eagle.py, medusa.py.

A head may know a part of the vocabulary only (FR-Spec; Zhao et al., 2025): on a small model a draft that pays for the
whole head gains nothing.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import Source
from jaxserve.models.weights import Leaf, fuse_tensors, leaves_of


@dataclass(frozen=True, kw_only=True)
class HeadConfig(ABC):
    """What a head is, hashable.

    layer: its one layer, as a decoder of one; None where it has no attention
    vocab_size: the target's
    target_hidden: width of the target's hidden states
    draft_vocab: how many tokens it knows; None is all
    own_head: whether it has a vocabulary head, or uses the target's
    """

    method: str
    layer: ModelConfig | None
    vocab_size: int
    target_hidden: int
    draft_vocab: int | None = None
    own_head: bool = False

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Width of the states that a draft starts from."""

    @property
    @abstractmethod
    def products(self) -> dict[str, tuple[int, int]]:
        """(in, out) of every matrix that states are multiplied by."""

    @abstractmethod
    def new(self, dtype: Any = jnp.float32) -> "DraftHead":
        """The head, with zeros for weights."""

    @abstractmethod
    def source(self, path: str) -> Source:
        """The stored tensors behind an array."""


class DraftHead(nnx.Module):
    """A head. `token_ids`: the target's ids of the draft vocabulary, ascending; None where that is the whole
    vocabulary."""

    def __init__(self, config: HeadConfig):
        self.config = config
        known = config.draft_vocab
        self.token_ids = TokenIds(jnp.zeros(known, jnp.int32)) if known is not None else None


class TokenIds(nnx.Variable):
    """The target's ids of the tokens that a head knows."""


def head_leaves(config: HeadConfig) -> list[Leaf]:
    """Every array of a head, in the order of its state, with the stored tensors that make it."""
    return leaves_of(nnx.eval_shape(config.new), config.source, config.layer)


def num_parameters(config: HeadConfig) -> int:
    """Values of a head, with the columns that it takes from the target's."""
    own = sum(math.prod(leaf.shape) for leaf in head_leaves(config))
    shares = config.draft_vocab is not None and not config.own_head
    return own + (config.draft_vocab * config.state_size if shares else 0)


def build_head(config: HeadConfig, *, dtype, read: Callable[[str], np.ndarray]) -> DraftHead:
    """A head filled with stored tensors; of `d2t`, which holds differences, `read` returns them as they are."""
    graph, state = nnx.split(nnx.eval_shape(config.new))
    arrays = []
    for leaf in head_leaves(config):
        tensors = [np.asarray(read(name)) for name in leaf.tensors]
        if leaf.path == "token_ids":
            below = np.arange(len(tensors[0])) if "d2t" in leaf.tensors else 0
            value = (below + tensors[0]).astype(np.int32)
        else:
            value = fuse_tensors(leaf.fuse, [tensor.astype(dtype) for tensor in tensors], config.layer)
        arrays.append(jax.device_put(np.array(value, order="C", copy=True)))
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), arrays))


def random_head(
    config: HeadConfig, seed: int = 0, *, token_ids: Int[np.ndarray, " draft_vocab"] | None = None, dtype=jnp.float32
) -> DraftHead:
    """A head to be trained or tested: matrices of deviation 1 / sqrt(in), unit norms, no biases."""
    generator = np.random.default_rng(seed)

    def read(name: str) -> np.ndarray:
        shape = shapes[name]
        if name in ("d2t", "token_map"):
            return token_ids - np.arange(len(token_ids)) if name == "d2t" else token_ids
        if len(shape) == 1:
            return np.zeros(shape, np.float32) if name.endswith("bias") else np.ones(shape, np.float32)
        return generator.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[1]))

    shapes = {name: shape for leaf in head_leaves(config) for name, shape in leaf.tensors.items()}
    return build_head(config, dtype=dtype, read=read)
