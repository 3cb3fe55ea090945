"""Model families as data: how each reads its `config.json`, and which stored tensors make which parameter.

A new dense family is a new entry in `FAMILIES`. Knows no JAX.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple


class Fuse(Enum):
    """How stored tensors (matrices `[out, in]`, as torch keeps them) become one parameter of ours.

    The shapes are those of the parameter; G is the number of query heads per KV head.
    """

    COPY = "as it is"
    TRANSPOSE = "[in, out]"
    QKV = "q, k, v -> [hidden, kv_heads, (G + 2) * head_dim]"
    QKV_BIAS = "q, k, v -> [kv_heads, (G + 2) * head_dim]"
    OUT = "[kv_heads, G * head_dim, hidden]"
    GATE_UP = "gate, up -> [hidden, 2, ffn]"
    GATE_UP_BIAS = "gate, up -> [2, ffn]"


class Source(NamedTuple):
    """Where a parameter comes from. `{i}` in a name stands for the layer."""

    names: tuple[str, ...]
    fuse: Fuse = Fuse.COPY


class Windows(Enum):
    """Which layers attend through a sliding window."""

    NONE = "no layer"
    ALL = "every layer, if `sliding_window` is set"
    LISTED = "with `use_sliding_window`: by `layer_types`; without that list see `Family.unlisted_windows`"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of `config.json`.

    `defaults` are the fields that may be absent, with the value that transformers gives them; all others are
    required. A bias is fixed (bool) or follows the named field.
    """

    defaults: Mapping[str, Any]
    qkv_bias: bool | str = "attention_bias"
    out_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    qk_norm: bool = False
    nope_layers: bool = False
    windows: Windows = Windows.NONE
    unlisted_windows: str = "max_window_layers"
    weights: Mapping[str, Source]


_ATTENTION = "model.layers.{i}.self_attn."
_MLP = "model.layers.{i}.mlp."

LLAMA_WEIGHTS: Mapping[str, Source] = MappingProxyType(
    {
        "embed": Source(("model.embed_tokens.weight",)),
        "norm.scale": Source(("model.norm.weight",)),
        "head": Source(("lm_head.weight",), Fuse.TRANSPOSE),
        "layers.{i}.attention_norm.scale": Source(("model.layers.{i}.input_layernorm.weight",)),
        "layers.{i}.mlp_norm.scale": Source(("model.layers.{i}.post_attention_layernorm.weight",)),
        "layers.{i}.qkv": Source(tuple(_ATTENTION + f"{p}_proj.weight" for p in "qkv"), Fuse.QKV),
        "layers.{i}.qkv_bias": Source(tuple(_ATTENTION + f"{p}_proj.bias" for p in "qkv"), Fuse.QKV_BIAS),
        "layers.{i}.q_norm.scale": Source((_ATTENTION + "q_norm.weight",)),
        "layers.{i}.k_norm.scale": Source((_ATTENTION + "k_norm.weight",)),
        "layers.{i}.out": Source((_ATTENTION + "o_proj.weight",), Fuse.OUT),
        "layers.{i}.out_bias": Source((_ATTENTION + "o_proj.bias",)),
        "layers.{i}.gate_up": Source((_MLP + "gate_proj.weight", _MLP + "up_proj.weight"), Fuse.GATE_UP),
        "layers.{i}.gate_up_bias": Source((_MLP + "gate_proj.bias", _MLP + "up_proj.bias"), Fuse.GATE_UP_BIAS),
        "layers.{i}.down": Source((_MLP + "down_proj.weight",), Fuse.TRANSPOSE),
        "layers.{i}.down_bias": Source((_MLP + "down_proj.bias",)),
    }
)

_COMMON = {
    "hidden_act": "silu",
    "head_dim": None,
    "rope_theta": 10_000.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_WINDOWED = {"use_sliding_window": False, "layer_types": None}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(
            defaults=_COMMON | {"num_key_value_heads": None, "bos_token_id": 1, "eos_token_id": 2},
            mlp_bias="mlp_bias",
            weights=LLAMA_WEIGHTS,
        ),
        "MistralForCausalLM": Family(
            defaults=_COMMON | {"sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2},
            qkv_bias=False,
            out_bias=False,
            windows=Windows.ALL,
            weights=LLAMA_WEIGHTS,
        ),
        "SmolLM3ForCausalLM": Family(
            defaults=_COMMON
            | _WINDOWED
            | {"rope_theta": 2_000_000.0, "no_rope_layers": None, "no_rope_layer_interval": 4}
            | {"tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001},
            mlp_bias="mlp_bias",
            nope_layers=True,
            windows=Windows.LISTED,
            unlisted_windows="no_rope_layers",
            weights=LLAMA_WEIGHTS,
        ),
        "Qwen2ForCausalLM": Family(
            defaults=_COMMON | _WINDOWED,
            qkv_bias=True,
            out_bias=False,
            windows=Windows.LISTED,
            weights=LLAMA_WEIGHTS,
        ),
        "Qwen3ForCausalLM": Family(
            defaults=_COMMON | _WINDOWED | {"head_dim": 128},
            qk_norm=True,
            windows=Windows.LISTED,
            weights=LLAMA_WEIGHTS,
        ),
    }
)
