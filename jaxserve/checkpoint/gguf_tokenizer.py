"""The tokenizer of a GGUF file, rebuilt as Hugging Face's tokenizer.json and tokenizer_config.json."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jaxserve.checkpoint.gguf_reader import GGUFError, GGUFFile

_CONTROL, _USER_DEFINED = 3, 4


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# How a text is cut before merges are applied, by the name in `tokenizer.ggml.pre`.
PRE_TOKENIZERS = {
    "gpt-2": _byte_level,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
}


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The byte-level BPE tokenizer that the file describes; an error that names what is not supported."""
    model, pre = file.require("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise GGUFError(f"{file.path}: tokenizer.ggml.model {model!r} is not supported, only 'gpt2' (byte-level)")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise GGUFError(f"{file.path}: the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not one of {known}")
    tokens, types = file.require("tokenizer.ggml.tokens"), file.require("tokenizer.ggml.token_type")
    if len(tokens) != len(types) or len(set(tokens)) != len(tokens):
        raise GGUFError(f"{file.path}: tokenizer.ggml.tokens are not distinct, or not as many as token_type")
    merges = [tuple(merge.split(" ")) for merge in file.require("tokenizer.ggml.merges")]
    try:
        bpe = models.BPE({token: token_id for token_id, token in enumerate(tokens)}, merges)
    except Exception as error:  # the library raises bare Exceptions
        raise GGUFError(f"{file.path}: tokenizer.ggml.merges do not fit the tokens: {error}") from error
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            add = tokenizer.add_special_tokens if kind == _CONTROL else tokenizer.add_tokens
            add([AddedToken(token, normalized=False)])
    _surround(file, tokenizer, tokens)
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


def _surround(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Let the tokenizer put the first and last token around a text where the file asks for it."""
    template, special = ["$A"], []
    for name, place in (("bos", 0), ("eos", 2)):
        if file.metadata.get(f"tokenizer.ggml.add_{name}_token", False):
            token = _named_token(file, name)
            if token is None:
                raise GGUFError(f"{file.path}: add_{name}_token is set, but there is no {name}_token_id")
            template.insert(place, token)
            special.append((token, tokens.index(token)))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
