"""What a model is, read from a Hugging Face `config.json`. Knows no weights and no JAX arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.models.fields import CheckpointError, Fields, UnsupportedModelError, nearest
from jaxserve.models.registry import FAMILIES, Family, Windows
from jaxserve.models.rope import RopeScaling, rope_from_hf

__all__ = ["DTYPES", "CheckpointError", "ModelConfig", "UnsupportedModelError"]

DTYPES = ("float32", "bfloat16", "float16")
_NO_SCALING = RopeScaling()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder, hashable.

    `windows[i]` is the number of positions that layer i sees (the query's own among them), None for all;
    `dtype` is what the checkpoint says, None where it is silent.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = _NO_SCALING
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...]
    uses_rope: tuple[bool, ...]
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None

    @property
    def q_per_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """(in, out) of every matrix that hidden states are multiplied by."""
        heads = self.num_heads * self.head_dim
        return {
            "qkv": (self.hidden_size, heads + 2 * self.num_kv_heads * self.head_dim),
            "out": (heads, self.hidden_size),
            "gate_up": (self.hidden_size, 2 * self.intermediate_size),
            "down": (self.intermediate_size, self.hidden_size),
            "head": (self.hidden_size, self.vocab_size),
        }

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, max_model_len: int | None = None) -> "ModelConfig":
        """Reads the content of a `config.json`; `max_model_len` matters to rope type `dynamic` only.

        Raises CheckpointError for a missing or wrong field, UnsupportedModelError for what we do not have.
        """
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        fields = Fields(values=config, where="config.json", defaults=family.defaults)
        _refuse_unsupported(fields)
        num_layers = fields.integer("num_hidden_layers")
        uses_rope = _uses_rope(family, fields, num_layers)
        max_position = fields.integer("max_position_embeddings")
        rope_theta, rope_scaling = rope_from_hf(
            config,
            default_theta=fields.number("rope_theta"),
            max_position=max_position,
            max_model_len=max_model_len,
        )
        bos = fields.token_ids("bos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            **_heads(fields),
            rms_norm_eps=fields.number("rms_norm_eps"),
            max_position_embeddings=max_position,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=_bias(family.qkv_bias, fields),
            out_bias=_bias(family.out_bias, fields),
            mlp_bias=_bias(family.mlp_bias, fields),
            qk_norm=family.qk_norm,
            windows=_windows(family, fields, num_layers, uses_rope),
            uses_rope=uses_rope,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=fields.token_ids("eos_token_id"),
            dtype=_dtype(config),
        )


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise CheckpointError(f"config.json: architectures={architectures!r}, but it must be a list of one name")
    name = architectures[0]
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"config.json: architectures=[{name!r}] is not supported{nearest(str(name), FAMILIES)}; "
            f"known architectures: {', '.join(FAMILIES)}"
        )
    return name


def _refuse_unsupported(fields: Fields) -> None:
    if (act := fields.get("hidden_act")) != "silu":
        raise UnsupportedModelError(f"config.json: hidden_act={act!r} is not supported; it must be 'silu'")
    if quantization := fields.values.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedModelError(
            f"config.json: quantization_config: quant_method={method!r} is not supported; "
            "use a checkpoint in float32, bfloat16 or float16"
        )


def _heads(fields: Fields) -> dict[str, int]:
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer_or_none("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.wrong("num_attention_heads", f"divisible by num_key_value_heads={kv_heads}")
    head_dim = fields.integer_or_none("head_dim")
    if head_dim is None:
        if fields.integer("hidden_size") % heads:
            raise fields.wrong("hidden_size", f"divisible by num_attention_heads={heads} where head_dim is absent")
        head_dim = fields.integer("hidden_size") // heads
    if head_dim % 2 or head_dim < 4:
        raise CheckpointError(f"config.json: head_dim={head_dim}, but it must be even and at least 4")
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def _bias(rule: bool | str, fields: Fields) -> bool:
    return fields.flag(rule) if isinstance(rule, str) else rule


def _uses_rope(family: Family, fields: Fields, num_layers: int) -> tuple[bool, ...]:
    if not family.nope_layers:
        return (True,) * num_layers
    if fields.get("no_rope_layers") is None:
        interval = fields.integer("no_rope_layer_interval")
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    listed = fields.per_layer("no_rope_layers", num_layers)
    if not all(entry in (0, 1) for entry in listed):
        raise fields.wrong("no_rope_layers", "a list of 1 (rope) and 0 (none)")
    return tuple(bool(entry) for entry in listed)


def _windows(family: Family, fields: Fields, num_layers: int, uses_rope: tuple[bool, ...]) -> tuple[int | None, ...]:
    if family.windows is Windows.NONE:
        return (None,) * num_layers
    if family.windows is Windows.ALL:
        return (fields.integer_or_none("sliding_window"),) * num_layers
    if not fields.flag("use_sliding_window"):
        return (None,) * num_layers
    if (window := fields.integer_or_none("sliding_window")) is None:
        return (None,) * num_layers
    if fields.get("layer_types") is not None:
        types = fields.per_layer("layer_types", num_layers)
        if unknown := sorted({str(t) for t in types} - {"full_attention", "sliding_attention"}):
            raise UnsupportedModelError(
                f"config.json: layer_types contains {unknown[0]!r}; known: full_attention, sliding_attention"
            )
        slides = [t == "sliding_attention" for t in types]
    elif family.unlisted_windows == "no_rope_layers":
        slides = [not rope for rope in uses_rope]
    else:
        first = fields.get("max_window_layers")
        if not isinstance(first, int) or first < 0:
            raise fields.wrong("max_window_layers", "the number of lower layers without a window")
        slides = [i >= first for i in range(num_layers)]
    return tuple(window if slide else None for slide in slides)


def _dtype(config: Mapping[str, Any]) -> str | None:
    name = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(name)
    if value is None:
        return None
    dtype = str(value).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"config.json: {name}={value!r} is not supported; known: {', '.join(DTYPES)}")
    return dtype
