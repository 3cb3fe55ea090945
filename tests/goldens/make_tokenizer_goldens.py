"""Makes `tokenizers.json`: token ids of hard texts from transformers' own Llama 3 and Qwen2 tokenizers.

    python tests/goldens/make_tokenizer_goldens.py        (needs transformers 5; takes a second)

The vocabularies are small and learned from the texts; how texts are normalised, cut and merged is transformers':
`TikTokenConverter`, which makes Llama 3's tokenizer.json, and `Qwen2Tokenizer`.
"""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

TEXTS = [
    "It's I'M we'll YOU'LL they've he'd don't O'REILLY'S 'tis ''s 'ſ",
    "1 12 123 1234 12345 3.14159 1,000,000 x86_64 ²³ ١٢٣٤ Ⅷ 一二三",
    "The quick brown fox (jumps) over: the lazy-dog; the END!!! ...",
    "  two  spaces   three\tand\ttabs \t mixed  ",
    "lines\nand\r\nmore\n\n\nblank \n with spaces \n\n  indented:\n    deeper\n",
    "\n",
    " ",
    "   ",
    "trailing   ",
    "日本語のテキスト、漢字とカナ。中文字符 한국어 텍스트",
    "emoji 😀😀 👩‍👩‍👧‍👦 🇩🇪 ❤️ ✨end",
    "caf\u00e9 cafe\u0301 \u1100\u1161 \u212b \ufb01 nai\u0308ve",  # composed and decomposed: NFC matters
    "naïve Straße ΑΒΓ αβγ Привет мир שלום مرحبا हिन्दी ไทย",
    "def f(x):\n\treturn x**2  # squared\n\n\nif __name__ == '__main__':\n    f(10)\n",
    "https://example.org/a?b=c&d=100%25#frag user@example.org",
    "a\u00a0b\u2003c\u200bd\ufeffe \x00\x1f\x7f",
    "zqxj zqxj, zqxjs",
    "",
]
UNREACHABLE = "zqxj"  # a token that no merges lead to


def learned(pattern: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A small vocabulary and its merges, learned from the texts."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    words = [text.replace(UNREACHABLE, "") for text in TEXTS]
    tokenizer.train_from_iterator(words * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


class Llama3Converter(TikTokenConverter):
    """transformers' converter over ranks that are in memory."""

    @staticmethod
    def load_tiktoken_bpe(ranks: dict[bytes, int]) -> dict[bytes, int]:
        return ranks


def llama3() -> dict:
    vocabulary, _ = learned(TikTokenConverter().pattern)
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    ranks = {bytes(byte_of[letter] for letter in token): rank for token, rank in vocabulary.items()}
    tokenizer = Llama3Converter({**ranks, UNREACHABLE.encode(): len(ranks)}).converted()
    model = json.loads(tokenizer.to_str())["model"]
    return golden(model["vocab"], model["merges"], tokenizer.encode)


def qwen2() -> dict:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    vocabulary, merges = learned(PRETOKENIZE_REGEX)
    vocabulary |= {UNREACHABLE: len(vocabulary), "<|endoftext|>": len(vocabulary) + 1}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges)
    return golden(vocabulary, merges, tokenizer.backend_tokenizer.encode)


def golden(vocabulary: dict[str, int], merges: list, encode) -> dict:
    return {
        "tokens": sorted(vocabulary, key=vocabulary.get),
        "merges": [" ".join(merge) for merge in merges],
        "ids": [encode(text).ids for text in TEXTS],
    }


if __name__ == "__main__":
    content = {"texts": TEXTS, "llama-bpe": llama3(), "qwen2": qwen2()}
    file = Path(__file__).parent / "tokenizers.json"
    file.write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n")
    print({name: (len(content[name]["tokens"]), content[name]["ids"][-2]) for name in ("llama-bpe", "qwen2")})
