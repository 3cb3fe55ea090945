"""Medusa (Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024): heads
that each guess one token from the target's last hidden state, after its final norm. The target's own head guesses the
token after position p; here, from the state at p,
    x = block_i(state p),   logits of token p+2+i = lm_head_i(x),   a block's layers: x + silu(x weight + bias)
and the guesses are independent of each other. Medusa-1: the target is not trained along. Drafts are a chain, of one
guess a position.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.models.decoder import Linear, linear
from jaxserve.models.draft_head import DraftHead, HeadConfig
from jaxserve.models.registry import Fuse, Source


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """
    num_heads: the most drafts
    num_layers: of a block
    shared: whether all heads have one vocabulary head
    """

    method: str = "medusa"
    layer: None = None
    num_heads: int
    num_layers: int = 1
    bias: bool = False
    shared: bool = False
    own_head: bool = True

    @property
    def state_size(self) -> int:
        return self.target_hidden

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        hidden = self.target_hidden
        block = {"block": (hidden, hidden)} if self.num_layers else {}
        return block | {"head": (hidden, self.draft_vocab or self.vocab_size)}

    def new(self, dtype: Any = jnp.float32) -> "MedusaHeads":
        return MedusaHeads(self, dtype=dtype)

    def source(self, path: str) -> Source:
        if path == "token_ids":
            return Source(("token_map",))
        if path.startswith("lm_heads."):
            return Source((path + ".weight",), Fuse.TRANSPOSE)
        return Source((path,), Fuse.TRANSPOSE if path.endswith("weight") else Fuse.COPY)


class ResidualLayer(nnx.Module):
    """x + silu(x weight + bias)."""

    def __init__(self, size: int, *, bias: bool, dtype):
        self.weight = nnx.Param(jnp.zeros((size, size), dtype))
        self.bias = nnx.Param(jnp.zeros(size, dtype)) if bias else None

    def __call__(self, x: Float[Array, "rows hidden"], linear: Linear = linear) -> Float[Array, "rows hidden"]:
        inner = linear(x, self.weight[...])
        if self.bias is not None:
            inner = inner + self.bias[...]
        return x + jax.nn.silu(inner.astype(jnp.float32)).astype(x.dtype)


class MedusaBlock(nnx.Module):
    """Residual layers, one after the other."""

    def __init__(self, config: MedusaConfig, *, dtype):
        layers = [ResidualLayer(config.target_hidden, bias=config.bias, dtype=dtype) for _ in range(config.num_layers)]
        self.layers = nnx.List(layers)

    def __call__(self, x: Float[Array, "rows hidden"], linear: Linear = linear) -> Float[Array, "rows hidden"]:
        for layer in self.layers:
            x = layer(x, linear)
        return x


class MedusaHeads(DraftHead):
    """A block for each head, and its vocabulary head [hidden, draft_vocab]; one of these if they share it."""

    def __init__(self, config: MedusaConfig, *, dtype=jnp.float32):
        super().__init__(config)
        shape = config.target_hidden, config.draft_vocab or config.vocab_size
        self.blocks = nnx.List([MedusaBlock(config, dtype=dtype) for _ in range(config.num_heads)])
        count = 1 if config.shared else config.num_heads
        self.lm_heads = nnx.List([nnx.Param(jnp.zeros(shape, dtype)) for _ in range(count)])
