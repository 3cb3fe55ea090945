"""Small tokenizers of every kind that checkpoints carry, made on the spot."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

TEXT = ["the cat sat on the mat, déjà vu!", "日本語 🎉 👩‍👩‍👧 naïve 12 345", "def f(x):\n    return x + 1\n"]
SPECIAL = ["<|eos|>", "<|user name|>"]  # the second one's space is in no byte alphabet


def byte_level_backend() -> Tokenizer:
    """GPT-2's kind: every byte has a token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": alphabet, "special_tokens": SPECIAL, "show_progress": False}
    backend.train_from_iterator(TEXT, BpeTrainer(vocab_size=330, **options))
    backend.add_tokens([AddedToken("<tool call é>"), AddedToken("ĠĊ")])
    return backend


def byte_fallback_backend(strip: bool = True) -> Tokenizer:
    """Llama 2's kind (Gemma's without `strip`): `▁` for a space, a token for every byte."""
    words = ["▁", "▁▁", "▁the", "▁cat", "▁▁the", "c", "a", "t", "h", "e", "the", "ca", "cat", "é", "日", "\n"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("c", "a"), ("ca", "t"), ("▁", "cat"), ("▁", "▁")]
    model = models.BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_tokens([AddedToken("<think>"), AddedToken(" ")])
    return backend


def metaspace_backend() -> Tokenizer:
    """T5's kind, with no byte tokens."""
    tokens = ["<unk>", "▁", "▁the", "▁cat", "s", "▁▁", "a▁b", "é", "the"]
    backend = Tokenizer(models.Unigram([(token, -float(i)) for i, token in enumerate(tokens)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return backend


def word_piece_backend() -> Tokenizer:
    """BERT's kind: spaces between words are made by the decoder."""
    tokens = ["[UNK]", "the", "cat", "##s", ".", "n't", "do", "'", "##'", "é", "[SEP]"]
    backend = Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return backend


def bare_backend() -> Tokenizer:
    """Words with no decoder at all, and a hole in the ids."""
    return Tokenizer(models.WordLevel({"the": 0, "cat": 1, "é": 5}, unk_token="the"))


BACKENDS = {
    "byte_level": byte_level_backend,
    "llama2": byte_fallback_backend,
    "gemma": lambda: byte_fallback_backend(strip=False),
    "metaspace": metaspace_backend,
    "word_piece": word_piece_backend,
    "bare": bare_backend,
}
