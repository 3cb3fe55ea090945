"""EAGLE: one layer that continues a target's hidden states, and so guesses its next tokens.

EAGLE-1 (Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024): at position p,
    x = fc([embed(token p), state p-1]),   state p = layer(x),   logits of token p+1 = target's head(state p)
where the target's states are those after its final norm, and the layer has no norm in front of its attention.

EAGLE-3 (Li et al., 2025): at position p,
    x = [norm(embed(token p)), norm(state p-1)],   state p = state p-1 + attention(x), and its MLP,
    logits of token p+1 = head(norm(state p)),   the target's states being fc([its states in front of three layers])
with an embedding, a head and a final norm of its own.

Where there is no state before, at position 0, the layer's inputs are zeros; the published recipes leave it out.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import DecoderLayer, Linear, Norm, RMSNorm
from jaxserve.models.draft_head import DraftHead, HeadConfig
from jaxserve.models.registry import LLAMA_WEIGHTS, Fuse, Source


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """EAGLE-1 or EAGLE-3, by `method`.

    aux_layers: EAGLE-3: the layers in front of which the target's states are taken; the number of layers is the
        output of the last
    """

    layer: ModelConfig
    aux_layers: tuple[int, ...] = ()
    fc_bias: bool = False
    own_embed: bool = False

    @property
    def state_size(self) -> int:
        return self.layer.hidden_size

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        hidden, third, found = self.layer.hidden_size, self.method == "eagle3", self.layer.products
        inner = self.target_hidden * len(self.aux_layers) if third else 2 * hidden
        qkv = (2 * hidden if third else hidden, found["qkv"][1])
        return found | {"fc": (inner, hidden), "qkv": qkv, "head": (hidden, self.draft_vocab or self.vocab_size)}

    def new(self, dtype: Any = jnp.float32) -> "EagleHead":
        return EagleHead(self, dtype=dtype)

    def source(self, path: str) -> Source:
        return _TABLE[path]


class EagleLayer(DecoderLayer):
    """EAGLE-1: fc [2 * hidden, hidden] and a layer without the first norm, from `layer_inputs` to the next states."""

    def __init__(self, config: EagleConfig, *, dtype):
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

    def __init__(self, config: EagleConfig, *, dtype):
        super().__init__(config.layer, 0, rngs=None, dtype=dtype)
        hidden = config.layer.hidden_size
        self.hidden_norm = RMSNorm(hidden, eps=config.layer.rms_norm_eps, dtype=dtype)
        self.qkv = nnx.Param(jnp.zeros((2 * hidden, *self.qkv[...].shape[1:]), dtype))

    def _inputs(self, hidden: Array, linear: Linear, norm: Norm) -> tuple[Array, Array]:
        embed, hidden = jnp.split(hidden, 2, axis=-1)
        both = jnp.concatenate([self.attention_norm(embed, norm), self.hidden_norm(hidden, norm)], axis=-1)
        return hidden, both


class EagleHead(DraftHead):
    """A head; `embed` [vocab, hidden] and `head` [hidden, draft_vocab] are None where they are the target's.

    fc: EAGLE-3: [target_hidden * len(aux_layers), hidden]
    """

    def __init__(self, config: EagleConfig, *, dtype=jnp.float32):
        super().__init__(config)
        hidden, vocab = config.layer.hidden_size, config.vocab_size
        third = config.method == "eagle3"
        zeros = lambda present, *shape: nnx.Param(jnp.zeros(shape, dtype)) if present else None
        self.layer = (Eagle3Layer if third else EagleLayer)(config, dtype=dtype)
        self.fc = zeros(third, config.target_hidden * len(config.aux_layers), hidden)
        self.norm = RMSNorm(hidden, eps=config.layer.rms_norm_eps, dtype=dtype) if third else None
        self.embed = zeros(config.own_embed, vocab, hidden)
        self.head = zeros(config.own_head, hidden, config.draft_vocab or vocab)


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
