"""A tiny checkpoint folder with a tokenizer, for what takes models by name (LLM, command line)."""

import json
from pathlib import Path

import tokenizers
from golden_models import load_golden, write_checkpoint
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.text.tokenizer import Tokenizer

GOLDEN = load_golden("qwen3")
EOS = "</s>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# One token bucket and one row bucket: three programs, and everybody shares them through the compilation cache.
SHAPES = {
    "max_num_batched_tokens": 8,
    "max_num_seqs": 8,
    "num_pages": 32,
    "deterministic": False,
    "dtype": "float32",
    "max_model_len": 128,
}


def byte_backend(vocab_size: int) -> tokenizers.Tokenizer:
    """A token for every byte, ASCII first, cut to `vocab_size`; id 2 is the end of sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (not 33 <= ord(c) < 127, c not in "ĠĊ", c))
    tokens = ["<unk>", "<s>", EOS, *alphabet][:vocab_size]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", EOS])
    return backend


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    return Tokenizer(byte_backend(vocab_size), eos_token=EOS, vocab_size=vocab_size)


def write_tiny_checkpoint(folder: Path) -> Path:
    """The golden model of Qwen3 with a tokenizer of its 128 ids and a chat template; returns `folder`."""
    write_checkpoint(GOLDEN, folder)
    byte_backend(GOLDEN.config["vocab_size"]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": CHAT_TEMPLATE}))
    return folder


def write_hub_cache(home: Path, name: str) -> Path:
    """The same as a snapshot in the hub cache of `home` (HF_HOME); returns the snapshot's folder."""
    commit = "0" * 40
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return write_tiny_checkpoint(repository / "snapshots" / commit)
