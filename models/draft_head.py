"""Draft heads: one layer that continues a target's hidden states, and so guesses its next tokens.

EAGLE-1 (Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024): at position p,
    x = fc([embed(token p), state p-1]),   state p = layer(x),   logits of token p+1 = target's head(state p)
where the target's states are those after its final norm, and the layer has no norm in front of its attention.

EAGLE-3 (Li et al., 2025): at position p,
    x = [norm(embed(token p)), norm(state p-1)],   state p = state p-1 + attention(x), and its MLP,
    logits of token p+1 = head(norm(state p)),   the target's states being fc([its states in front of three layers])
with an embedding, a head and a final norm of its own.

Either head may know a part of the vocabulary only (`d2t`; Zhao et al., "FR-Spec", 2025). Where there is no state
before, at position 0, the layer's inputs are zeros; the published recipes leave that position out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import DecoderLayer, Linear, Norm, RMSNorm
from jaxserve.models.registry import LLAMA_WEIGHTS, Fuse, Source
from jaxserve.models.weights import Leaf, fuse_tensors, leaves_of


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What a head is, hashable.

    layer: its one layer, as a decoder of one; `vocab_size` is the target's
    target_hidden: width of the target's hidden states
    aux_layers: EAGLE-3: the layers in front of which the target's states are taken; the number of layers is the
        output of the last
    draft_vocab: how many tokens it knows; None is all
    """

    method: str
    layer: ModelConfig
    target_hidden: int
    aux_layers: tuple[int, ...] = ()
    draft_vocab: int | None = None
    fc_bias: bool = False
    own_embed: bool = False
    own_head: bool = False

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """(in, out) of every matrix that states are multiplied by."""
        hidden, third, found = self.layer.hidden_size, self.method == "eagle3", self.layer.products
        inner = self.target_hidden * len(self.aux_layers) if third else 2 * hidden
        qkv = (2 * hidden if third else hidden, found["qkv"][1])
        return found | {"fc": (inner, hidden), "qkv": qkv, "head": (hidden, self.draft_vocab or self.layer.vocab_size)}


class TokenIds(nnx.Variable):
    """The target's ids of the tokens that a head knows."""


class EagleLayer(DecoderLayer):
    """EAGLE-1: fc [2 * hidden, hidden] and a layer without the first norm, from `layer_inputs` to the next states."""

    def __init__(self, config: HeadConfig, *, dtype):
        super().__init__(config.layer, 0, rngs=None, dtype=dtype)
        del self.attention_norm
        hidden = config.layer.hidden_size
        self.fc = nnx.Param(jnp.zeros((2 * hidden, hidden), dtype))
        self.fc_bias = nnx.Param(jnp.zeros(hidden, dtype)) if config.fc_bias else None

    def _inputs(self, hidden: Array, linear: Linear, norm: Norm) -> tuple[Array, Array]:
        hidden = linear(hidden, self.fc[...])
        if self.fc_bias is not None:
            hidden = hidden + self.fc_bias[...]
        return hidden, hidden


class Eagle3Layer(DecoderLayer):
    """EAGLE-3: qkv [2 * hidden, ...] over both of `layer_inputs`, each behind its norm, to the next states."""

    def __init__(self, config: HeadConfig, *, dtype):
        super().__init__(config.layer, 0, rngs=None, dtype=dtype)
        hidden = config.layer.hidden_size
        self.hidden_norm = RMSNorm(hidden, eps=config.layer.rms_norm_eps, dtype=dtype)
        self.qkv = nnx.Param(jnp.zeros((2 * hidden, *self.qkv[...].shape[1:]), dtype))

    def _inputs(self, hidden: Array, linear: Linear, norm: Norm) -> tuple[Array, Array]:
        embed, hidden = jnp.split(hidden, 2, axis=-1)
        both = jnp.concatenate([self.attention_norm(embed, norm), self.hidden_norm(hidden, norm)], axis=-1)
        return hidden, both


class EagleHead(nnx.Module):
    """A head; `embed` [vocab, hidden] and `head` [hidden, draft_vocab] are None where they are the target's.

    token_ids: the target's ids of the draft vocabulary, ascending; None where that is the whole vocabulary
    fc: EAGLE-3: [target_hidden * len(aux_layers), hidden]
    """

    def __init__(self, config: HeadConfig, *, dtype=jnp.float32):
        self.config = config
        hidden, vocab = config.layer.hidden_size, config.layer.vocab_size
        third = config.method == "eagle3"
        zeros = lambda present, *shape: nnx.Param(jnp.zeros(shape, dtype)) if present else None
        self.layer = (Eagle3Layer if third else EagleLayer)(config, dtype=dtype)
        self.fc = zeros(third, config.target_hidden * len(config.aux_layers), hidden)
        self.norm = RMSNorm(hidden, eps=config.layer.rms_norm_eps, dtype=dtype) if third else None
        self.embed = zeros(config.own_embed, vocab, hidden)
        self.head = zeros(config.own_head, hidden, config.draft_vocab or vocab)
        known = config.draft_vocab
        self.token_ids = TokenIds(jnp.zeros(known, jnp.int32)) if known is not None else None


def layer_inputs(
    embedded: Float[Array, "tokens hidden"], before: Float[Array, "tokens hidden"], first: Bool[Array, " tokens"]
) -> Float[Array, "tokens twice_hidden"]:
    """A layer's input: tokens and the states before them; zeros at the `first` position."""
    both = jnp.concatenate([embedded, before.astype(embedded.dtype)], axis=-1)
    return jnp.where(first[:, None], jnp.zeros((), both.dtype), both)


_PREFIX = "layers.0."
_TABLE = {
    **{
        path.replace("layers.{i}.", "layer."): Source(
            tuple(name.replace("model.layers.{i}.", _PREFIX) for name in source.names), source.fuse
        )
        for path, source in LLAMA_WEIGHTS.items()
        if path.startswith("layers.")
    },
    "layer.hidden_norm.scale": Source((_PREFIX + "hidden_norm.weight",)),
    "layer.fc": Source(("fc.weight",), Fuse.TRANSPOSE),
    "layer.fc_bias": Source(("fc.bias",)),
    "fc": Source(("fc.weight",), Fuse.TRANSPOSE),
    "norm.scale": Source(("norm.weight",)),
    "embed": Source(("embed_tokens.weight",)),
    "head": Source(("lm_head.weight",), Fuse.TRANSPOSE),
    "token_ids": Source(("d2t",)),
}


def head_leaves(config: HeadConfig) -> list[Leaf]:
    """Every array of a head, in the order of its state, with the stored tensors that make it."""
    return leaves_of(nnx.eval_shape(lambda: EagleHead(config)), _TABLE.__getitem__, config.layer)


def num_parameters(config: HeadConfig) -> int:
    """Values of a head, with the columns that it takes from the target's."""
    own = sum(math.prod(leaf.shape) for leaf in head_leaves(config))
    shares = config.draft_vocab is not None and not config.own_head
    return own + (config.draft_vocab * config.layer.hidden_size if shares else 0)


def build_head(config: HeadConfig, *, dtype, read: Callable[[str], np.ndarray]) -> EagleHead:
    """A head filled with stored tensors; of `d2t`, which holds differences, `read` returns them as they are."""
    graph, state = nnx.split(nnx.eval_shape(lambda: EagleHead(config)))
    arrays = []
    for leaf in head_leaves(config):
        tensors = [np.asarray(read(name)) for name in leaf.tensors]
        if leaf.path == "token_ids":
            value = (np.arange(len(tensors[0])) + tensors[0]).astype(np.int32)
        else:
            value = fuse_tensors(leaf.fuse, [tensor.astype(dtype) for tensor in tensors], config.layer)
        arrays.append(jax.device_put(np.array(value, order="C", copy=True)))
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), arrays))


def random_head(
    config: HeadConfig, seed: int = 0, *, token_ids: Int[np.ndarray, " draft_vocab"] | None = None, dtype=jnp.float32
) -> EagleHead:
    """A head to be trained or tested: matrices of deviation 1 / sqrt(in), unit norms, no biases."""
    generator = np.random.default_rng(seed)

    def read(name: str) -> np.ndarray:
        shape = shapes[name]
        if name == "d2t":
            return token_ids - np.arange(len(token_ids))
        if len(shape) == 1:
            return np.zeros(shape, np.float32) if name.endswith("bias") else np.ones(shape, np.float32)
        return generator.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[1]))

    shapes = {name: shape for leaf in head_leaves(config) for name, shape in leaf.tensors.items()}
    return build_head(config, dtype=dtype, read=read)
