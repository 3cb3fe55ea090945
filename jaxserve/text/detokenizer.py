"""Token ids to text as they arrive, without ever showing half a character."""

import codecs
from collections.abc import Sequence

from jaxserve.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns a growing sequence of token ids into a growing text.

    For any ids, cut in any way, the pushes' results and the last flush joined are
    `tokenizer.decode(all ids, skip_special_tokens)`. Text is held back only as long as later tokens
    may change it: the bytes of an unfinished character, and with byte-fallback vocabularies a run of
    byte tokens (see `decoding.py`). The cost of a token does not depend on what came before it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._decoding = tokenizer.decoding
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._push = self._push_bytes if self._decoding.byte_level else self._push_texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._started = False  # whether there has been any text; before that, tokens may decode differently
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; return the text that has become certain."""
        self._tokenizer.check_ids(ids)
        return self._push([token_id for token_id in ids if token_id not in self._skipped])

    @property
    def pending(self) -> bool:
        """Whether text is held back."""
        return bool(self._held or self._utf8.getstate()[0])

    def flush(self) -> str:
        """Return the text that is still held back. Nothing may be pushed afterwards."""
        return self._utf8.decode(b"", final=True) + self._release()

    def _push_bytes(self, ids: list[int]) -> str:
        token_bytes = self._decoding.token_bytes
        return self._utf8.decode(b"".join([token_bytes(token_id) for token_id in ids]))

    def _push_texts(self, ids: list[int]) -> str:
        texts = []
        for token_id in filter(self._decoding.exists, ids):
            if self._decoding.is_byte_token(token_id):
                self._held.append(token_id)
            elif self._started:
                texts.append(self._release())
                texts.append(self._decoding.token_bytes(token_id).decode())
            else:
                self._held.append(token_id)
                texts.append(self._release())
        return "".join(texts)

    def _release(self) -> str:
        """The text of what is held. At the very start it stays held, too, if there is none."""
        if not self._held:
            return ""
        if self._started:
            text = self._decoding.text_within(self._held)
        else:
            text = self._tokenizer.decode(self._held, skip_special_tokens=False)
            self._started = text != ""
        if self._started:
            self._held = []
        return text
