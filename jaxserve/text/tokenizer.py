"""Text to token ids and back, for tokenizers that Hugging Face's `tokenizers` library can hold.

The library is used directly, not through transformers, whose import alone takes seconds. The tokens
that only `tokenizer_config.json` names are added as transformers adds them; what stands around a text
(`<s>`) is up to `tokenizer.json` alone, as with transformers 5. Chat templates are no part of this
module (see chat_template.py).
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from jaxserve.text.decoding import TokenDecoding
from jaxserve.validation import lone_surrogate

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json with merges.txt")
_LONG = 2000  # characters or tokens: work on more is done by the functions that let other threads run meanwhile
_TOKEN_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")


class Tokenizer:
    """One tokenizer, immutable after loading and safe to use from several threads.

    Attributes:
        folder: where it was loaded from; None if it was made from a `tokenizers.Tokenizer`.
        vocab_size: ids are `0 <= id < vocab_size`.
        bos_token_id, eos_token_id: None where the tokenizer names no such token.
        special_ids: the ids that `skip_special_tokens` leaves out.
        backend: the library's tokenizer; not to be changed.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        vocab_size: int | None = None,
        folder: Path | None = None,
    ):
        """Wrap `backend`. `vocab_size` is the model's, where it pads its vocabulary: the ids that the
        tokenizer does not know then exist and have no text."""
        backend.no_truncation()
        backend.no_padding()
        self.folder = folder
        self.vocab_size = max(_size(backend), vocab_size or 0)
        self.bos_token_id = None if bos_token is None else backend.token_to_id(bos_token)
        self.eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.backend = backend

    @classmethod
    def from_folder(cls, folder: str | Path, *, vocab_size: int | None = None) -> "Tokenizer":
        """Load the tokenizer of a checkpoint folder.

        Raises:
            FileNotFoundError: there are no tokenizer files in the folder.
            ValueError: a file cannot be read; the message names it.
        """
        folder = Path(folder)
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        backend = _load_backend(folder)
        _add_missing_tokens(backend, config)
        bos_token, eos_token = _content(config.get("bos_token")), _content(config.get("eos_token"))
        return cls(backend, bos_token=bos_token, eos_token=eos_token, vocab_size=vocab_size, folder=folder)

    def encode(self, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """The token ids of `text`; `field` is what an error message calls the text."""
        check_unicode(text, field)
        if len(text) < _LONG:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, bytes that are no UTF-8 as U+FFFD, spaces as they are (never "cleaned up")."""
        self.check_ids(ids)
        if len(ids) < _LONG:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes, maybe of half a character, that a token adds within a text (special ones too)."""
        self.check_ids((token_id,))
        return self.decoding.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """The text that a token adds within a text; U+FFFD for bytes that are no characters by themselves."""
        return self.token_bytes(token_id).decode(errors="replace")

    def check_ids(self, ids: Iterable[int], field: str = "token ids") -> None:
        """Raise a ValueError that names the ids outside the vocabulary, if there are any."""
        wrong = [token_id for token_id in ids if not 0 <= token_id < self.vocab_size]
        if wrong:
            shown = ", ".join(map(str, wrong[:8])) + (", …" if len(wrong) > 8 else "")
            raise ValueError(f"{field} must be in [0, {self.vocab_size}), got {shown}")

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens' ids by their names; no other text becomes one of them."""
        return {self.backend.id_to_token(token_id): token_id for token_id in sorted(self.special_ids)}

    @cached_property
    def longest_token(self) -> int | None:
        """The most bytes of text that one token stands for; None if a text may lose some before it is cut."""
        if not self.decoding.byte_level or self.backend.normalizer is not None:
            return None
        return max(len(self.decoding.token_bytes(token_id)) for token_id in range(self.vocab_size))

    @cached_property
    def decoding(self) -> TokenDecoding:
        """How this tokenizer's tokens become text; a ValueError if it cannot be done token by token."""
        return TokenDecoding(self.backend)


def check_unicode(text: str, field: str) -> None:
    """Raise a ValueError that names `field` and the place if there is a lone surrogate in `text`."""
    place = lone_surrogate(text)
    if place is not None:
        code = f"U+{ord(text[place]):04X}"
        raise ValueError(f"{field} must be valid Unicode: there is a lone surrogate, {code}, at position {place}")


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{file} cannot be read as a tokenizer: {error}") from error
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        raise FileNotFoundError(f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
    from transformers import AutoTokenizer  # takes seconds, and only old checkpoints need it

    backend = getattr(AutoTokenizer.from_pretrained(folder), "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{folder}: transformers finds no fast tokenizer there; save one as tokenizer.json")
    return backend


def _read_json(file: Path) -> dict:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error


def _content(token: str | dict | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict) -> None:
    """Add the tokens that only the configuration knows, in the order of their ids, as transformers does.

    The library ignores a token that was added before.
    """
    for _, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        flags = {name: entry[name] for name in _TOKEN_FLAGS if name in entry}
        add = backend.add_special_tokens if entry.get("special") else backend.add_tokens
        add([AddedToken(entry["content"], **flags)])
    named = [config.get(f"{name}_token") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    for field in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(field) or []
        named += more.values() if isinstance(more, dict) else more
    special = [AddedToken(_content(name), normalized=False) for name in named if name is not None]
    backend.add_special_tokens(special)


def _size(backend: tokenizers.Tokenizer) -> int:
    """One more than the largest id: a vocabulary may have holes."""
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
