"""The tokenizer of a GGUF file, rebuilt as Hugging Face's tokenizer.json and tokenizer_config.json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.checkpoint.gguf_reader import GGUFError, GGUFFile

_CONTROL, _USER_DEFINED = 3, 4


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _cut_by(digits: str) -> pre_tokenizers.PreTokenizer:
    """The rule that Llama 3 and Qwen2 share: contractions, words with what stands before them, digits, the rest."""
    rule = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(rule), behavior="isolated"), whole])


class _Rules(NamedTuple):
    """What `tokenizer.ggml.pre` stands for; as in the tokenizer.json that the model was published with.

    Attributes:
        pre_tokenizer: how a text is cut before merges are applied.
        normalizer: what is done to a text before it is cut.
        ignore_merges: a piece that is a token is that token, even if no merges lead to it.
        add_bos: what llama.cpp does where the file does not say whether a text begins with the first token.
    """

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    add_bos: bool = False


RULES = {
    "gpt-2": _Rules(_byte_level),
    "smollm": _Rules(lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])),
    "llama-bpe": _Rules(lambda: _cut_by(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True),
    "qwen2": _Rules(lambda: _cut_by(r"\p{N}"), normalizers.NFC()),
}


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The byte-level BPE tokenizer that the file describes; an error that names what is not supported."""
    model, pre = file.require("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise GGUFError(f"{file.path}: tokenizer.ggml.model {model!r} is not supported, only 'gpt2' (byte-level)")
    if pre not in RULES:
        known = ", ".join(RULES)
        raise GGUFError(f"{file.path}: the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not one of {known}")
    rules = RULES[pre]
    tokens, types = file.require("tokenizer.ggml.tokens"), file.require("tokenizer.ggml.token_type")
    if len(tokens) != len(types) or len(set(tokens)) != len(tokens):
        raise GGUFError(f"{file.path}: tokenizer.ggml.tokens are not distinct, or not as many as token_type")
    merges = [tuple(merge.split(" ")) for merge in file.require("tokenizer.ggml.merges")]
    try:
        vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
        bpe = models.BPE(vocabulary, merges, ignore_merges=rules.ignore_merges)
    except Exception as error:  # the library raises bare Exceptions
        raise GGUFError(f"{file.path}: tokenizer.ggml.merges do not fit the tokens: {error}") from error
    tokenizer = Tokenizer(bpe)
    if rules.normalizer is not None:
        tokenizer.normalizer = rules.normalizer
    tokenizer.pre_tokenizer = rules.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            add = tokenizer.add_special_tokens if kind == _CONTROL else tokenizer.add_tokens
            add([AddedToken(token, normalized=False)])
    _surround(file, tokenizer, tokens, rules)
    return tokenizer


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the chat template, into `folder`."""
    tokenizer = build_tokenizer(file)
    config = {
        # Classes of transformers' own replace the pre-tokenizer of tokenizer.json by theirs.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.number("context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        config[f"{name}_token"] = _named_token(file, key)
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = file.metadata["tokenizer.chat_template"]
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps({key: value for key, value in config.items() if value is not None}, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _named_token(file: GGUFFile, name: str) -> str | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = file.metadata.get(key)
    if token_id is None:
        return None
    tokens = file.require("tokenizer.ggml.tokens")
    if token_id >= len(tokens):
        raise GGUFError(f"{file.path}: {key} is {token_id}, but there are {len(tokens)} tokens")
    return tokens[token_id]


def _surround(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str], rules: _Rules) -> None:
    """Let the tokenizer put the first and last token around a text where the file asks for it."""
    template, special = ["$A"], []
    for name, place, default in (("bos", 0, rules.add_bos), ("eos", 2, False)):
        if file.metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            token = _named_token(file, name)
            if token is None:
                raise GGUFError(f"{file.path}: a text is to have the {name} token, but there is no {name}_token_id")
            template.insert(place, token)
            special.append((token, tokens.index(token)))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
