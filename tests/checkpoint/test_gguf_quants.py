"""Quantised GGUF tensors against the definition of each type, one value at a time."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_gguf import HEAD_DIM, HEADS, KV_HEADS, TOKENS, write_gguf

from jaxserve.checkpoint.gguf import READABLE_TYPES, GGUFError, convert_gguf

HIDDEN, FFN = 256, 512
SIZES = {"omit": ("embedding_length", "feed_forward_length")}
SIZES |= {"llama__embedding_length": HIDDEN, "llama__feed_forward_length": FFN}
MATRICES = {
    "token_embd": (len(TOKENS), HIDDEN),
    "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.ffn_gate": (FFN, HIDDEN),
    "blk.0.ffn_up": (FFN, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, FFN),
}
# The rows of attn_output have HEADS * HEAD_DIM = 64 values, too few for a block of 256.
NARROW = {"blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM)}
NORMS = {"blk.0.attn_norm": (HIDDEN,), "blk.0.ffn_norm": (HIDDEN,), "output_norm": (HIDDEN,)}
IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def half(block: bytes, offset: int) -> float:
    return struct.unpack_from("<e", block, offset)[0]


def nibble(values: bytes, i: int) -> int:
    """Value i of 32: the low halves of 16 bytes come first."""
    return values[i % 16] >> (4 if i >= 16 else 0) & 15


def q4_0(b: bytes, i: int) -> float:
    return half(b, 0) * (nibble(b[2:], i) - 8)


def q4_1(b: bytes, i: int) -> float:
    return half(b, 0) * nibble(b[4:], i) + half(b, 2)


def q5_0(b: bytes, i: int) -> float:
    fifth = int.from_bytes(b[2:6], "little") >> i & 1
    return half(b, 0) * (nibble(b[6:], i) + 16 * fifth - 16)


def q5_1(b: bytes, i: int) -> float:
    fifth = int.from_bytes(b[4:8], "little") >> i & 1
    return half(b, 0) * (nibble(b[8:], i) + 16 * fifth) + half(b, 2)


def q8_0(b: bytes, i: int) -> float:
    return half(b, 0) * struct.unpack_from("b", b, 2 + i)[0]


def iq4_nl(b: bytes, i: int) -> float:
    return half(b, 0) * IQ4_NL_VALUES[nibble(b[2:], i)]


def two_bits(quants: bytes, i: int) -> int:
    """Value i of 256: each 32 bytes hold 128 values, in four rounds of 32."""
    return quants[32 * (i // 128) + i % 32] >> 2 * (i % 128 // 32) & 3


def q2_k(b: bytes, i: int) -> float:
    scales, quants, d, dmin = b[:16], b[16:80], half(b, 80), half(b, 82)
    scale = scales[i // 16]
    return d * (scale & 15) * two_bits(quants, i) - dmin * (scale >> 4)


def q3_k(b: bytes, i: int) -> float:
    mask, quants, scales, d = b[:32], b[32:96], b[96:108], half(b, 108)
    s = i // 16
    low = scales[s] & 15 if s < 8 else scales[s - 8] >> 4
    scale = (low | (scales[8 + s % 4] >> 2 * (s // 4) & 3) << 4) - 32
    third = mask[i % 32] >> (i // 32) & 1
    return d * scale * (two_bits(quants, i) - (0 if third else 4))


def scale_and_min(scales: bytes, s: int) -> tuple[int, int]:
    """The eight pairs of 6-bit numbers that 12 bytes hold."""
    if s < 4:
        return scales[s] & 63, scales[s + 4] & 63
    scale = scales[s + 4] & 15 | (scales[s - 4] >> 6) << 4
    return scale, scales[s + 4] >> 4 | (scales[s] >> 6) << 4


def q4_k(b: bytes, i: int) -> float:
    d, dmin, scales, quants = half(b, 0), half(b, 2), b[4:16], b[16:]
    scale, minimum = scale_and_min(scales, i // 32)
    quant = quants[32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15
    return d * scale * quant - dmin * minimum


def q5_k(b: bytes, i: int) -> float:
    d, dmin, scales, fifths, quants = half(b, 0), half(b, 2), b[4:16], b[16:48], b[48:]
    scale, minimum = scale_and_min(scales, i // 32)
    quant = quants[32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15
    quant += 16 * (fifths[i % 32] >> (i // 32) & 1)
    return d * scale * quant - dmin * minimum


def q6_k(b: bytes, i: int) -> float:
    lows, highs, d = b[:128], b[128:192], half(b, 208)
    low = lows[64 * (i // 128) + i % 64] >> (4 if i % 128 >= 64 else 0) & 15
    high = highs[32 * (i // 128) + i % 32] >> 2 * (i % 128 // 32) & 3
    scale = struct.unpack_from("b", b, 192 + i // 16)[0]
    return d * scale * ((low | high << 4) - 32)


# type: (values in a block, its bytes, where its 16-bit floats lie, the definition)
DEFINITIONS = {
    "Q4_0": (32, 18, (0,), q4_0),
    "Q4_1": (32, 20, (0, 2), q4_1),
    "Q5_0": (32, 22, (0,), q5_0),
    "Q5_1": (32, 24, (0, 2), q5_1),
    "Q8_0": (32, 34, (0,), q8_0),
    "IQ4_NL": (32, 18, (0,), iq4_nl),
    "Q2_K": (256, 84, (80, 82), q2_k),
    "Q3_K": (256, 110, (108,), q3_k),
    "Q4_K": (256, 144, (0, 2), q4_k),
    "Q5_K": (256, 176, (0, 2), q5_k),
    "Q6_K": (256, 210, (208,), q6_k),
}


def random_rows(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Rows of random blocks, `[rows, bytes]`: every bit of a block is used, its floats are finite."""
    values, size, floats, _ = DEFINITIONS[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (shape[0] * shape[1] // values, size), np.uint8)
    for offset in floats:
        halves = generator.normal(0, 0.02, len(blocks)).astype("<f2")
        blocks[:, offset : offset + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(shape[0], -1)


def defined(kind: str, rows: np.ndarray) -> np.ndarray:
    """What rows mean. Exact: the products fit 24 bits, and a float64 holds their difference."""
    values, size, _, definition = DEFINITIONS[kind]
    blocks = [block.tobytes() for block in rows.reshape(-1, size)]
    return np.array([definition(b, i) for b in blocks for i in range(values)], np.float32).reshape(len(rows), -1)


def norms() -> dict[str, np.ndarray]:
    return {name: np.ones(shape, np.float32) for name, shape in NORMS.items()}


def random_matrices(kinds: dict[str, str]) -> dict[str, tuple[str, np.ndarray]]:
    """Every matrix in its type."""
    shapes = (MATRICES | NARROW).items()
    return {name: (kinds[name], random_rows(kinds[name], shape, seed)) for seed, (name, shape) in enumerate(shapes)}


def converted(path: Path, matrices: dict[str, tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The tensors of a file of these matrices under Hugging Face's names."""
    file = write_gguf(path, norms() | matrices, **SIZES)
    convert_gguf(file, file.with_suffix(""))
    return load_file(file.with_suffix("") / "model.safetensors")


def test_every_readable_type_is_tested_here():
    assert set(READABLE_TYPES) == {*DEFINITIONS, "F32", "F16", "BF16"}


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_values_of_a_type(tmp_path, kind):
    narrow = kind if DEFINITIONS[kind][0] == 32 else "Q8_0"
    matrices = random_matrices(dict.fromkeys(MATRICES, kind) | dict.fromkeys(NARROW, narrow))
    found = converted(tmp_path / "m.gguf", matrices)
    embed, down = found["model.embed_tokens.weight"], found["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(embed, defined(*matrices["token_embd"]))
    rows = matrices["blk.0.ffn_down"][1]
    np.testing.assert_array_equal(down[-4:], defined(kind, rows[-4:]))
    assert down.shape == MATRICES["blk.0.ffn_down"]


@pytest.mark.parametrize(
    ("most", "some", "narrow"), [("Q4_K", "Q6_K", "Q5_0"), ("Q3_K", "Q5_K", "IQ4_NL"), ("Q2_K", "Q4_K", "Q4_0")]
)
def test_files_of_mixed_types(tmp_path, most, some, narrow):
    """As Q4_K_M, Q3_K_M and Q2_K_S files are made: some matrices get a finer type, narrow ones one of 32."""
    kinds = dict.fromkeys(MATRICES, most) | dict.fromkeys(("token_embd", "blk.0.attn_v", "blk.0.ffn_down"), some)
    matrices = random_matrices(kinds | dict.fromkeys(NARROW, narrow))
    found = converted(tmp_path / "m.gguf", matrices)
    names = {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
    names |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    for ours, theirs in names.items():
        kind, rows = matrices[f"blk.0.{theirs}"]
        np.testing.assert_array_equal(found[f"model.layers.0.{ours}.weight"][:8], defined(kind, rows[:8]))
    # llama.cpp puts row (head, half, pair) of Llama's q and k at (head, pair, half)
    rows = np.arange(HEADS * HEAD_DIM).reshape(HEADS, HEAD_DIM // 2, 2).transpose(0, 2, 1).ravel()
    q = defined(*matrices["blk.0.attn_q"])
    np.testing.assert_array_equal(found["model.layers.0.self_attn.q_proj.weight"], q[rows])
    assert all(value.dtype == np.float32 for value in found.values())


@pytest.mark.parametrize("kind", ["Q8_K", "TQ2_0", "IQ1_S"])
def test_a_type_that_is_not_supported_is_named(tmp_path, kind):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows = np.zeros((FFN, HIDDEN // block * size), np.uint8)
    matrices = random_matrices(dict.fromkeys(MATRICES, "Q4_K") | dict.fromkeys(NARROW, "Q5_0"))
    file = write_gguf(tmp_path / "m.gguf", norms() | matrices | {"blk.0.ffn_up": (kind, rows)}, **SIZES)
    with pytest.raises(GGUFError, match=rf"m\.gguf: tensor blk\.0\.ffn_up\.weight is of type {kind}, not one of F32"):
        convert_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_memory_is_that_of_a_few_tensors(tmp_path):
    layers, shape = 24, (FFN, HIDDEN)
    rows = random_rows("Q4_K", shape, 0)
    values = norms() | {"token_embd": ("Q4_K", random_rows("Q4_K", MATRICES["token_embd"], 1))}
    values |= {f"blk.{i}.ffn_up": ("Q4_K", rows) for i in range(layers)}
    file = write_gguf(tmp_path / "m.gguf", values, **SIZES)
    tracemalloc.start()
    try:
        convert_gguf(file, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 4 * FFN * HIDDEN < layers * 4 * FFN * HIDDEN
