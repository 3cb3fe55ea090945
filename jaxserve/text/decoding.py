"""What one token contributes to a text, whatever the kind of tokenizer.

Two kinds are told apart. With a byte-level vocabulary (GPT-2, Llama 3, Qwen, SmolLM) a text is the
tokens' bytes one after the other, decoded as UTF-8. With all others (Llama 2, Gemma, WordPiece) a
token has a text of its own that depends on nothing but whether it is the first, except for tokens
that stand for one byte (`<0xE2>`): a run of those is decoded as a whole, so that one bad byte makes
every byte of its run a U+FFFD.
"""

import json
import re

import tokenizers

# Decoders that look at each token alone. What else exists (CTC, BPEDecoder) looks at the neighbours.
_LOCAL = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenDecoding:
    """The contributions of a tokenizer's tokens, computed when first asked for.

    Attributes:
        byte_level: a text is its tokens' bytes, and nothing else.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        steps = _decoder_steps(backend)
        names = [step["type"] for step in steps]
        self.byte_level = names == ["ByteLevel"]
        if not self.byte_level:
            _check_local(steps)
        self._backend = backend
        self._has_byte_tokens = "ByteFallback" in names
        self._byte_of_char = _byte_level_alphabet() if self.byte_level else {}
        self._bytes: dict[int, bytes] = {}
        self._anchor, self._anchor_length = (0, 0) if self.byte_level else _find_anchor(backend)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds anywhere but at the start; none for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def exists(self, token_id: int) -> bool:
        """Whether the tokenizer has a token of this id; if not, decoding passes over it."""
        return self._backend.id_to_token(token_id) is not None

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token stands for one byte of a run that is decoded as a whole."""
        if not self._has_byte_tokens:
            return False
        return _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "") is not None

    def text_within(self, ids: list[int]) -> str:
        """The text of tokens that follow others (not for byte-level tokenizers)."""
        text = self._backend.decode([self._anchor, *ids], skip_special_tokens=False)
        return text[self._anchor_length :]

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            try:
                return bytes(self._byte_of_char[char] for char in token)
            except KeyError:  # an added token with, say, a space is not spelled in the byte alphabet
                return token.encode()
        if self.is_byte_token(token_id):
            return bytes([int(token[3:5], 16)])
        return self.text_within([token_id]).encode()


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    pending, steps = [decoder], []
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = step["decoders"] + pending
        else:
            steps.append(step)
    return steps


def _check_local(steps: list[dict]) -> None:
    """Raise unless each token's text depends on nothing but whether it is the first."""
    fused = False
    for step in steps:
        name = step["type"]
        if fused:  # one long text: what is done to it must concern single characters or the start
            local = (name == "Replace" and len(step["pattern"].get("String", "")) == 1) or (
                name == "Strip" and step["stop"] == 0
            )
        else:
            local = name in _LOCAL
        if not local:
            raise ValueError(f"the tokenizer's decoder {step} cannot be applied token by token")
        fused = fused or name == "Fuse"


def _find_anchor(backend: tokenizers.Tokenizer) -> tuple[int, int]:
    """A token to put before others so that they are not first, and the length of its text."""
    for token, token_id in backend.get_vocab(with_added_tokens=False).items():
        if token.isascii() and token.isalnum() and backend.decode([token_id], False) == token:
            return token_id, len(token)
    raise ValueError("the tokenizer's vocabulary holds no plain ASCII word")


def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table).

    Printable Latin-1 characters stand for themselves; the other bytes are, in their order, the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
