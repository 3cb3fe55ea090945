"""GGUF files (llama.cpp's format) to Hugging Face style folders in float32.

The whole conversion is `convert_gguf`; after it nothing else in the engine knows that GGUF exists.
Tensors are dequantised one at a time, so the memory needed is that of the largest one.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.quants import dequantize

from jaxserve.checkpoint.gguf_reader import GGUFError, GGUFFile, GGUFTensor, read_gguf
from jaxserve.checkpoint.gguf_tokenizer import write_tokenizer
from jaxserve.checkpoint.safetensors_file import write_safetensors
from jaxserve.models.rope import RopeScaling, inverse_frequencies, rope_from_hf

__all__ = ["GGUFError", "convert_gguf"]

# A K-quant file mixes the K types with F32; where rows are no multiple of 256, llama.cpp takes Q4_0, Q5_0, Q5_1, Q8_0
# or IQ4_NL instead. Q8_K is a type of its activations, which no file holds.
READABLE_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"),
)

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
# What the Llama models from 3.1 on share; their `factor` differs.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Architecture:
    """What differs between the families that GGUF names.

    Attributes:
        interleaved_rope: the file holds the rows of q and k so that the two halves of a rotated pair
            are neighbours; Hugging Face keeps the halves of a head apart.
    """

    hugging_face: str
    model_type: str
    interleaved_rope: bool


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved_rope=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", interleaved_rope=False),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", interleaved_rope=False),
}


def convert_gguf(path: str | Path, out_folder: str | Path, dtype_hint: str = "bfloat16") -> None:
    """Write the model of a GGUF file as config.json, model.safetensors, tokenizer.json and their like.

    The values stay float32: those of quantised files are not exact in 16 bits. `dtype_hint` is what
    config.json names, the dtype that the model is to run in where nobody asks for another.

    Raises:
        GGUFError: the file is no GGUF, is truncated, or holds what is not supported. Whatever can be
            known from the header is refused before anything is written.
    """
    file = read_gguf(path)
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None:
        raise GGUFError(f"{path}: architecture {file.architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    for tensor in file.tensors:
        if tensor.type_name not in READABLE_TYPES:
            known = ", ".join(READABLE_TYPES)
            raise GGUFError(f"{path}: tensor {tensor.name} is of type {tensor.type_name}, not one of {known}")
    config = _config(file, architecture, dtype_hint)
    tensors = {_hugging_face_name(file, tensor): tensor for tensor in file.tensors if tensor.name != _ROPE_FACTORS}
    out_folder = Path(out_folder)
    out_folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(file, out_folder)
    _write_json(out_folder / "config.json", config)
    _write_json(out_folder / "generation_config.json", _generation_config(file))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def value(name: str) -> np.ndarray:
        rows = _dequantized(tensors[name])
        projection = name.split(".")[-2]
        if architecture.interleaved_rope and projection in heads:
            return _rope_halves_apart(rows, heads[projection])
        return rows

    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_safetensors(out_folder / "model.safetensors", shapes, "float32", value)


def _config(file: GGUFFile, architecture: Architecture, dtype_hint: str) -> dict:
    heads = file.number("attention.head_count")
    hidden_size = file.number("embedding_length")
    names = {tensor.name for tensor in file.tensors}
    config = {
        "architectures": [architecture.hugging_face],
        "model_type": architecture.model_type,
        "dtype": dtype_hint,
        "vocab_size": file.tensor("token_embd.weight").shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.number("feed_forward_length"),
        "num_hidden_layers": file.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.number("attention.head_count_kv", heads),
        "head_dim": file.number("attention.key_length", hidden_size // heads),
        "hidden_act": "silu",
        "max_position_embeddings": file.number("context_length"),
        "rms_norm_eps": _shortest_float32(file.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest_float32(file.number("rope.freq_base", 10000.0)),
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
    }
    if scaling := _rope_scaling(file, config["rope_theta"], config["head_dim"]):
        config["rope_scaling"] = scaling
    return config | _generation_config(file)


def _rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict | None:
    if any(tensor.name == _ROPE_FACTORS for tensor in file.tensors):
        return _llama3_scaling(file, theta, head_dim)
    kind = file.metadata.get(f"{file.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise GGUFError(f"{file.path}: rope scaling {kind!r} is not one of none, linear, yarn")
    scaling = {"rope_type": kind, "factor": _shortest_float32(file.number("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.number("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict:
    """The rope scaling of Llama 3.1 and later. llama.cpp keeps only what it comes to, a divisor of each frequency."""
    divisors = _dequantized(file.tensor(_ROPE_FACTORS))
    scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA3_SCALING}
    config = {"rope_scaling": scaling, "rope_theta": theta}
    _, parsed = rope_from_hf(config, default_theta=theta, max_position=1, max_model_len=None)
    plain, scaled = (inverse_frequencies(theta, head_dim, kind) for kind in (RopeScaling(), parsed))
    if divisors.shape != plain.shape or not np.allclose(divisors, plain / scaled, rtol=1e-4):
        described = ", ".join(f"{name}={value}" for name, value in scaling.items())
        raise GGUFError(f"{file.path}: tensor {_ROPE_FACTORS} is not what the rope scaling {described} comes to")
    return scaling


def _generation_config(file: GGUFFile) -> dict:
    def token_id(name: str) -> int | None:
        return file.metadata.get(f"tokenizer.ggml.{name}_token_id")

    ends = list(dict.fromkeys(i for i in (token_id("eos"), token_id("eot")) if i is not None))
    ids = {
        "bos_token_id": token_id("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": token_id("padding"),
    }
    return {name: value for name, value in ids.items() if value is not None}


def _hugging_face_name(file: GGUFFile, tensor: GGUFTensor) -> str:
    if tensor.name in _TOP_NAMES:
        return _TOP_NAMES[tensor.name]
    match tensor.name.split("."):
        case ["blk", layer, part, ("weight" | "bias") as kind] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    raise GGUFError(f"{file.path}: tensor {tensor.name} has no place in a {file.architecture} model")


def _dequantized(tensor: GGUFTensor) -> np.ndarray:
    values = dequantize(tensor.data, tensor.type)
    return values.astype(np.float32, copy=False).reshape(tensor.shape)


def _rope_halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of the rows of q and k: (head, pair, half) to (head, half, pair)."""
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _shortest_float32(value: float) -> float:
    """1e-05 for the float32 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
