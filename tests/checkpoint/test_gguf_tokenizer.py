"""Tokenizers rebuilt from GGUF metadata, against transformers' own Llama 3 and Qwen2 tokenizers."""

import json
from pathlib import Path

import pytest

from jaxserve.checkpoint.gguf_reader import GGUFError, GGUFFile
from jaxserve.checkpoint.gguf_tokenizer import build_tokenizer, write_tokenizer
from jaxserve.text.tokenizer import Tokenizer

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "tokenizers.json").read_text())
TEXTS = GOLDENS["texts"]
FAMILIES = ("llama-bpe", "qwen2")
END = "<|end|>"


def gguf_file(pre: str, **fields) -> GGUFFile:
    """The metadata of a file with a golden's vocabulary and a special token behind it."""
    golden = GOLDENS[pre]
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*golden["tokens"], END],
        "tokenizer.ggml.token_type": [1] * len(golden["tokens"]) + [3],
        "tokenizer.ggml.merges": golden["merges"],
        "tokenizer.ggml.add_bos_token": False,
    }
    return GGUFFile(Path("m.gguf"), metadata | {f"tokenizer.ggml.{name}": value for name, value in fields.items()}, [])


@pytest.mark.parametrize("pre", FAMILIES)
def test_hard_texts_are_cut_and_merged_as_by_transformers(tmp_path, pre):
    write_tokenizer(gguf_file(pre), tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text, ids in zip(TEXTS, GOLDENS[pre]["ids"], strict=True):
        assert tokenizer.encode(text) == ids, text


def test_the_goldens_tell_the_families_apart():
    """Digits in threes or alone, composed letters, and a token that no merges lead to."""
    pieces = {}
    for pre in FAMILIES:
        backend = build_tokenizer(gguf_file(pre))
        cut = lambda text, backend=backend: [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        pieces[pre] = cut("12345 I'll\n\n x")
        unreachable = GOLDENS[pre]["tokens"].index("zqxj")
        assert (unreachable in GOLDENS[pre]["ids"][TEXTS.index("zqxj zqxj, zqxjs")]) == (pre == "llama-bpe")
        composed = backend.encode("e\u0301").ids == backend.encode("\u00e9").ids
        assert composed == (pre == "qwen2")
    assert pieces["llama-bpe"] == ["123", "45", "ĠI", "'ll", "ĊĊ", "Ġx"]
    assert pieces["qwen2"] == ["1", "2", "3", "4", "5", "ĠI", "'ll", "ĊĊ", "Ġx"]


@pytest.mark.parametrize("pre", FAMILIES)
def test_every_text_comes_back(pre):
    tokenizer = Tokenizer(build_tokenizer(gguf_file(pre)))
    for text in TEXTS:
        if pre == "llama-bpe":  # Qwen2 composes
            assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode(f"{text}{END}"), skip_special_tokens=False).endswith(END)


@pytest.mark.parametrize(
    ("pre", "fields", "begins"),
    [
        ("llama-bpe", {}, True),  # as llama.cpp: Llama 3's files do not say it
        ("llama-bpe", {"add_bos_token": False}, False),
        ("llama-bpe", {"add_bos_token": True}, True),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_the_first_token(pre, fields, begins):
    file = gguf_file(pre, bos_token_id=len(GOLDENS[pre]["tokens"]))
    del file.metadata["tokenizer.ggml.add_bos_token"]
    file.metadata.update({f"tokenizer.ggml.{name}": value for name, value in fields.items()})
    ids = build_tokenizer(file).encode("a").ids
    assert (ids[0] == len(GOLDENS[pre]["tokens"])) == begins
    assert len(ids) == 1 + begins


def test_a_missing_first_token_is_named():
    with pytest.raises(GGUFError, match=r"m\.gguf: a text is to have the bos token, but there is no bos_token_id"):
        build_tokenizer(gguf_file("llama-bpe", add_bos_token=True))
