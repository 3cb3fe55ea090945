"""The dense decoder as Flax NNX modules, for training and for the engine.

A layer knows neither pages nor quantisation: it calls the attention, the product and the norm that it is given. The
engine runs its own loop over `decoder.layers`; `Decoder.__call__` is the same loop for one whole sequence.

    attend(q [tokens, heads, head_dim], k [tokens, kv_heads, head_dim], v, scale=float, window=int | None)
        -> [tokens, heads, head_dim]; query head h reads KV head h // q_per_group
    linear(x [tokens, in], weight [in, *out], out_dtype=None) -> [tokens, *out] in out_dtype (None: x.dtype);
        only `Decoder.logits` passes out_dtype
    norm(x [tokens, ..., size], scale [size], eps) -> scale * x / rms(x) over the last axis

Rounding follows transformers: norms are computed in float32 and cast before the scale multiplies; every
product accumulates in float32 and is cast to the dtype of its input.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.models import rope
from jaxserve.models.config import ModelConfig

Attend = Callable[..., Array]
Linear = Callable[..., Array]
Norm = Callable[..., Array]
RopeTables = tuple[Float32[Array, "tokens half_dim"], Float32[Array, "tokens half_dim"]]


def linear(x: Float[Array, "tokens in"], weight: Float[Array, "in ..."], out_dtype=None) -> Array:
    """The default product: float32 accumulation, whatever JAX's default matmul precision is."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    product = jnp.tensordot(x, weight, axes=1, precision=precision, preferred_element_type=jnp.float32)
    return product.astype(out_dtype or x.dtype)


def rms_norm(x: Float[Array, "*batch size"], scale: Float[Array, " size"], eps: float) -> Float[Array, "*batch size"]:
    """The default norm: `scale * x / rms(x)` over the last axis."""
    wide = x.astype(jnp.float32)
    # As a product: XLA's CPU sums change their order with the array's size (from 4,096 elements on), so a row's
    # bits would depend on the number of rows. Its products keep theirs from 8 rows on.
    ones = jnp.ones((wide.shape[-1], 1), jnp.float32)
    total = jnp.tensordot(wide * wide, ones, axes=1, precision=jax.lax.Precision.HIGHEST)
    variance = total / wide.shape[-1]
    return scale * (wide * jax.lax.rsqrt(variance + eps)).astype(x.dtype)


def rope_tables(config: ModelConfig, positions: Int32[Array, "tokens"]) -> RopeTables:
    """The tables of these positions for the layers of a model."""
    frequencies = rope.inverse_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
    return rope.rope_tables(positions, frequencies, config.rope_scaling.attention_factor)


def causal_attention(
    q: Float[Array, "tokens heads dim"],
    k: Float[Array, "tokens kv_heads dim"],
    v: Float[Array, "tokens kv_heads dim"],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "tokens heads dim"]:
    """Dense attention over one sequence in order: query i sees the keys j with i - window < j <= i."""
    tokens, heads, dim = q.shape
    grouped = q.reshape(tokens, k.shape[1], heads // k.shape[1], dim)
    exact = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    scores = jnp.einsum("qkgd,jkd->kgqj", grouped, k, **exact) * scale
    distance = jnp.arange(tokens, dtype=jnp.int32)[:, None] - jnp.arange(tokens, dtype=jnp.int32)[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
    mixed = jnp.einsum("kgqj,jkd->qkgd", weights, v, **exact)
    return mixed.reshape(tokens, heads, dim).astype(q.dtype)


def _normal(rngs: nnx.Rngs | None, shape: tuple[int, ...], fan_in: int, dtype) -> nnx.Param:
    if rngs is None:  # the values do not matter: tracing zeros is ten times as fast
        return nnx.Param(jnp.zeros(shape, dtype))
    values = jax.random.normal(rngs.params(), shape, jnp.float32) * (1 / math.sqrt(fan_in))
    return nnx.Param(values.astype(dtype))


def _zeros(shape: tuple[int, ...], dtype, present: bool) -> nnx.Param | None:
    return nnx.Param(jnp.zeros(shape, dtype)) if present else None


class RMSNorm(nnx.Module):
    """The scale of a norm over the last axis."""

    def __init__(self, size: int, *, eps: float, dtype):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(size, dtype))

    def __call__(self, x: Float[Array, "*batch size"], norm: Norm = rms_norm) -> Float[Array, "*batch size"]:
        return norm(x, self.scale[...], self.eps)


class DecoderLayer(nnx.Module):
    """Attention and gated MLP, each behind its norm. Layers of one structure have equal graph definitions.

    Parameters (G query heads a group): qkv [hidden, kv_heads, (G + 2) * head_dim], the last axis being the G
    query heads of the group, its key, its value; out [kv_heads, G * head_dim, hidden]; gate_up
    [hidden, 2, ffn]; down [ffn, hidden]; biases as their product's output; `None` where the model has none.
    """

    def __init__(self, config: ModelConfig, index: int, *, rngs: nnx.Rngs | None, dtype):
        hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        groups, group_width = config.num_kv_heads, (config.q_per_group + 2) * head_dim
        query_width = config.q_per_group * head_dim
        self.window = config.windows[index]
        self.uses_rope = config.uses_rope[index]
        self.head_dim = head_dim
        self.attention_norm = RMSNorm(hidden, eps=config.rms_norm_eps, dtype=dtype)
        self.qkv = _normal(rngs, (hidden, groups, group_width), hidden, dtype)
        self.qkv_bias = _zeros((groups, group_width), dtype, config.qkv_bias)
        norm = lambda: RMSNorm(head_dim, eps=config.rms_norm_eps, dtype=dtype) if config.qk_norm else None
        self.q_norm, self.k_norm = norm(), norm()
        self.out = _normal(rngs, (groups, query_width, hidden), groups * query_width, dtype)
        self.out_bias = _zeros((hidden,), dtype, config.out_bias)
        self.mlp_norm = RMSNorm(hidden, eps=config.rms_norm_eps, dtype=dtype)
        self.gate_up = _normal(rngs, (hidden, 2, ffn), hidden, dtype)
        self.gate_up_bias = _zeros((2, ffn), dtype, config.mlp_bias)
        self.down = _normal(rngs, (ffn, hidden), ffn, dtype)
        self.down_bias = _zeros((hidden,), dtype, config.mlp_bias)

    def __call__(
        self,
        hidden: Float[Array, "tokens inputs"],
        rope: RopeTables,
        attend: Attend,
        linear: Linear = linear,
        norm: Norm = rms_norm,
    ) -> Float[Array, "tokens hidden"]:
        """From one residual stream to the next; the layer of a draft head reads more than that."""
        hidden, x = self._inputs(hidden, linear, norm)
        hidden = hidden + self._attention(x, rope, attend, linear, norm)
        return hidden + self._mlp(self.mlp_norm(hidden, norm), linear)

    def _inputs(self, hidden: Array, linear: Linear, norm: Norm) -> tuple[Array, Array]:
        """The residual stream, and what the attention reads."""
        return hidden, self.attention_norm(hidden, norm)

    @jax.named_scope("attention")
    def _attention(self, x: Array, tables: RopeTables, attend: Attend, linear: Linear, norm: Norm) -> Array:
        tokens, head_dim = x.shape[0], self.head_dim
        qkv = _biased(linear(x, self.qkv[...]), self.qkv_bias)
        qkv = qkv.reshape(tokens, qkv.shape[1], -1, head_dim)
        q, k, v = qkv[:, :, :-2].reshape(tokens, -1, head_dim), qkv[:, :, -2], qkv[:, :, -1]
        if self.q_norm is not None:
            q, k = self.q_norm(q, norm), self.k_norm(k, norm)
        if self.uses_rope:
            q, k = rope.rotate(q, *tables), rope.rotate(k, *tables)
        mixed = attend(q, k, v, scale=head_dim**-0.5, window=self.window)
        out = self.out[...]
        return _biased(linear(mixed.reshape(tokens, -1), out.reshape(-1, out.shape[-1])), self.out_bias)

    @jax.named_scope("mlp")
    def _mlp(self, x: Array, linear: Linear) -> Array:
        gate_up = _biased(linear(x, self.gate_up[...]), self.gate_up_bias)
        gate = jax.nn.silu(gate_up[:, 0].astype(jnp.float32)).astype(x.dtype)
        return _biased(linear(gate * gate_up[:, 1], self.down[...]), self.down_bias)


def _biased(x: Array, bias: nnx.Param | None) -> Array:
    return x if bias is None else x + bias[...]


class Decoder(nnx.Module):
    """The whole model. `embed` is [vocab, hidden]; `head` is [hidden, vocab], or None where `embed` is tied.

    A new one has random matrices of standard deviation 1 / sqrt(in), unit norms and zero biases.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None, dtype=jnp.float32):
        self.config = config
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embed = _normal(rngs, (vocab, hidden), hidden, dtype)
        self.layers = nnx.List(
            [DecoderLayer(config, index, rngs=rngs, dtype=dtype) for index in range(config.num_layers)]
        )
        self.norm = RMSNorm(hidden, eps=config.rms_norm_eps, dtype=dtype)
        self.head = None if config.tie_word_embeddings else _normal(rngs, (hidden, vocab), hidden, dtype)

    def embed_tokens(self, tokens: Int32[Array, "tokens"]) -> Float[Array, "tokens hidden"]:
        return jnp.take(self.embed[...], tokens, axis=0, mode="clip")

    def rope(self, positions: Int32[Array, "tokens"]) -> RopeTables:
        return rope_tables(self.config, positions)

    def final_norm(self, hidden: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        return self.norm(hidden)

    def logits(self, hidden: Float[Array, "tokens hidden"], linear: Linear = linear) -> Float32[Array, "tokens vocab"]:
        """Logits of what `final_norm` returned, never rounded below float32."""
        head = self.embed[...].T if self.head is None else self.head[...]
        return linear(hidden, head, out_dtype=jnp.float32)

    def __call__(
        self,
        tokens: Int32[Array, "tokens"],
        positions: Int32[Array, "tokens"],
        attend: Attend = causal_attention,
        linear: Linear = linear,
    ) -> Float[Array, "tokens hidden"]:
        """Hidden states of one sequence after the final norm."""
        hidden, tables = self.embed_tokens(tokens), self.rope(positions)
        for layer in self.layers:
            hidden = layer(hidden, tables, attend, linear)
        return self.final_norm(hidden)
