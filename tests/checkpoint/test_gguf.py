"""Tiny GGUF files written here, and the demo model against transformers' own reader."""

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import quantize
from safetensors.numpy import load_file

from jaxserve.checkpoint.demo_model import demo_model_folder
from jaxserve.checkpoint.gguf import GGUFError, convert_gguf
from jaxserve.checkpoint.gguf_reader import read_gguf
from jaxserve.text.tokenizer import Tokenizer

GOLDENS = np.load(Path(__file__).parents[1] / "goldens" / "smollm2.npz")
TEXTS = json.loads(GOLDENS["texts"].tobytes())
HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 64, 96, 2, 1, 32, 128
TOKENS = ["<|end|>", "<|start|>", "<tool>", "a", "b", "Ġ", "1", "ab", "Ġa", "ĠĠ"]
TOKEN_TYPES = [3, 3, 4, 1, 1, 1, 1, 1, 1, 1]

SHAPES = {
    "token_embd": (len(TOKENS), HIDDEN),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_norm": (HIDDEN,),
    "blk.0.ffn_gate": (FFN, HIDDEN),
    "blk.0.ffn_up": (FFN, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, FFN),
    "output_norm": (HIDDEN,),
}


def tensors(**more: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Random float32 values under llama.cpp's names, without `.weight`."""
    draw = np.random.default_rng(0)
    return {name: draw.standard_normal(shape, np.float32) for name, shape in (SHAPES | more).items()}


def write_gguf(
    path: Path, values: dict[str, np.ndarray], arch="llama", kind="F32", pre="gpt-2", omit=(), **fields
) -> Path:
    """Write a small model; matrices are stored as `kind`, `fields` are metadata to set or replace.

    A value may also be a pair: the name of a type, and the bytes of rows in that type.
    """
    writer = gguf.GGUFWriter(path, arch)
    sizes = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": 1,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    for name, value in sizes.items():
        if name not in omit:
            writer.add_uint32(f"{arch}.{name}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{arch}.rope.freq_base", 5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TOKEN_TYPES)
    writer.add_token_merges(["a b", "Ġ a", "Ġ Ġ"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    for name, value in fields.items():
        name = name.replace("__", ".")
        add = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
        }
        add[type(value)](name, value)
    for name, value in values.items():
        name = name if name.endswith(".bias") else f"{name}.weight"
        if isinstance(value, tuple):
            writer.add_tensor(name, value[1], raw_dtype=gguf.GGMLQuantizationType[value[0]])
            continue
        stored = gguf.GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
        writer.add_tensor(name, quantize(value, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(path: Path, **options) -> tuple[dict, dict[str, np.ndarray]]:
    """The config and the tensors that a file is converted to."""
    folder = path.with_suffix("")
    convert_gguf(path, folder, **options)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def test_config_and_names(tmp_path):
    values = tensors()
    config, found = convert(write_gguf(tmp_path / "m.gguf", values), dtype_hint="float16")
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    generation = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 0}
    assert len(found) == len(values)
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], values["token_embd"])
    np.testing.assert_array_equal(found["model.layers.0.mlp.down_proj.weight"], values["blk.0.ffn_down"])
    np.testing.assert_array_equal(found["model.layers.0.self_attn.v_proj.weight"], values["blk.0.attn_v"])


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_rotated_rows_and_family_tensors(tmp_path, arch):
    values = tensors(**{"blk.0.attn_q.bias": (HEADS * HEAD_DIM,), "output": (len(TOKENS), HIDDEN)})
    config, found = convert(write_gguf(tmp_path / "m.gguf", values, arch))
    assert config["architectures"] == [f"{arch.capitalize()}ForCausalLM"]
    assert config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(found["lm_head.weight"], values["output"])
    # llama.cpp puts row (head, half, pair) at (head, pair, half), for Llama only
    rows = np.arange(HEADS * HEAD_DIM)
    head, half, pair = rows // HEAD_DIM, rows % HEAD_DIM // (HEAD_DIM // 2), rows % (HEAD_DIM // 2)
    source = head * HEAD_DIM + 2 * pair + half if arch == "llama" else rows
    prefix = "model.layers.0.self_attn"
    np.testing.assert_array_equal(found[f"{prefix}.q_proj.weight"], values["blk.0.attn_q"][source])
    np.testing.assert_array_equal(found[f"{prefix}.q_proj.bias"], values["blk.0.attn_q.bias"][source])
    np.testing.assert_array_equal(found[f"{prefix}.k_proj.weight"], values["blk.0.attn_k"][source[:HEAD_DIM]])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"])
def test_values_are_near_what_was_quantised(tmp_path, kind):
    values = tensors()
    _, found = convert(write_gguf(tmp_path / "m.gguf", values, kind=kind))
    weight, original = found["model.layers.0.mlp.up_proj.weight"], values["blk.0.ffn_up"]
    steps = {
        "F32": 0,
        "F16": 1e-3,
        "BF16": 1e-2,
        "Q8_0": 0.02,
        "Q5_0": 0.2,
        "Q5_1": 0.2,
        "Q4_0": 0.4,
        "Q4_1": 0.4,
    }
    assert weight.dtype == np.float32
    assert np.abs(weight - original).max() <= steps[kind]
    assert np.corrcoef(weight.ravel(), original.ravel())[0, 1] > 0.99


def test_rope_scaling_and_several_ends(tmp_path):
    fields = {
        "llama__rope__scaling__type": "yarn",
        "llama__rope__scaling__factor": 4.0,
        "llama__rope__scaling__original_context_length": 32,
        "tokenizer__ggml__eot_token_id": 1,
    }
    config, _ = convert(write_gguf(tmp_path / "m.gguf", tensors(), **fields))
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    assert config["eos_token_id"] == [0, 1]


def test_tokenizer_of_a_tiny_file(tmp_path):
    for pre, spaced_digit in (("gpt-2", [5, 5, 6]), ("smollm", [9, 6])):
        path = write_gguf(tmp_path / f"{pre}.gguf", tensors(), pre=pre, tokenizer__ggml__add_bos_token=True)
        convert(path)
        tokenizer = Tokenizer.from_folder(path.with_suffix(""))
        assert tokenizer.encode("ab a<tool>b<|end|>") == [1, 7, 8, 2, 4, 0]
        assert tokenizer.encode("  1")[1:] == spaced_digit
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.special_ids) == (1, 0, {0, 1})
        config = json.loads((path.with_suffix("") / "tokenizer_config.json").read_text())
        assert config["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "gemma3"}, "architecture 'gemma3' is not one of llama, qwen2, qwen3"),
        (
            {"pre": "deepseek-llm"},
            r"the pre-tokenizer 'deepseek-llm' \(tokenizer.ggml.pre\) is not one of gpt-2, smollm, llama-bpe, qwen2",
        ),
        ({"omit": ("block_count",)}, "the metadata field llama.block_count is missing"),
        ({"llama__rope__scaling__type": "longrope"}, "rope scaling 'longrope'"),
        ({"kind": "TQ1_0"}, "tensor token_embd.weight is of type TQ1_0, not one of F32"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, options, message):
    values = tensors()
    if "kind" in options:
        values["token_embd"] = np.ones((len(TOKENS), 256), np.float32)
        values = {name: value for name, value in values.items() if value.ndim == 1 or name == "token_embd"}
    path = write_gguf(tmp_path / "m.gguf", values, **options)
    with pytest.raises(GGUFError, match=rf"m\.gguf: {message}"):
        convert_gguf(path, tmp_path / "out")
    assert not list(tmp_path.glob("out/*"))


def test_a_tensor_without_a_place_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tensors(ssm_a=(16,)))
    with pytest.raises(GGUFError, match=r"m\.gguf: tensor ssm_a\.weight has no place in a llama model"):
        convert_gguf(path, tmp_path / "out")


def llama3_divisors(factor: float, original_length: int = 8192) -> np.ndarray:
    """By what Llama 3.1 divides each frequency: by wavelength, nothing, the factor, or a blend between."""
    divisors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * 5000.0 ** (i / HEAD_DIM)
        if wavelength < original_length / 4:
            divisors.append(1.0)
        elif wavelength > original_length / 1:
            divisors.append(factor)
        else:
            smooth = (original_length / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_rope_scaling_of_llama_3(tmp_path):
    values = tensors()
    values["rope_freqs"] = llama3_divisors(32.0)
    assert len(set(values["rope_freqs"])) > 3  # all three cases occur
    config, found = convert(write_gguf(tmp_path / "m.gguf", values))
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert len(found) == len(values) - 1
    for wrong in (llama3_divisors(32.0, 4096), llama3_divisors(32.0)[:-1]):
        path = write_gguf(tmp_path / "wrong.gguf", values | {"rope_freqs": wrong})
        with pytest.raises(GGUFError, match=r"wrong\.gguf: tensor rope_freqs\.weight is not what .* factor=32\.0"):
            convert_gguf(path, tmp_path / "out")


def test_truncated_anywhere(tmp_path):
    content = write_gguf(tmp_path / "m.gguf", tensors()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (4, 8, 20, 60, 300, 700, 1200, len(content) // 2, len(content) - 1):
        cut.write_bytes(content[:length])
        with pytest.raises(GGUFError, match=r"cut\.gguf is truncated"):
            read_gguf(cut)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no GGUF file"),
        (b"PK\3\4 zip", "is no GGUF file"),
        (b"GGUF\0\0\0\3" + bytes(16), "version 50331648"),
    ],
)
def test_other_files(tmp_path, content, message):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(GGUFError, match=rf"m\.gguf.*{message}"):
        read_gguf(tmp_path / "m.gguf")


def test_demo_model_weights_are_those_of_transformers():
    found = load_file(demo_model_folder() / "model.safetensors")
    assert sorted(found) == sorted(TEXTS["weights"])
    for i, name in enumerate(TEXTS["weights"]):
        values = found[name].ravel()
        np.testing.assert_array_equal(values[GOLDENS["weight_positions"][i]], GOLDENS["weight_values"][i])
        np.testing.assert_allclose(np.linalg.norm(values.astype(np.float64)), GOLDENS["weight_norms"][i], rtol=1e-10)


@pytest.mark.parametrize(("texts", "ids"), [("prompts", "prompt_ids"), ("encodings", "encoding_ids")])
def test_demo_model_encodes_as_transformers(texts, ids):
    tokenizer = Tokenizer.from_folder(demo_model_folder())
    starts = GOLDENS[f"{ids}_starts"]
    for text, start, end in zip(TEXTS[texts], starts[:-1], starts[1:], strict=True):
        assert tokenizer.encode(text) == GOLDENS[ids][start:end].tolist(), text
