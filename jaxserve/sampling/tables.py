"""What a request asks of the logits, as tables for its slot on the device. Host side; knows no JAX."""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import numpy as np

from jaxserve.sampling_params import SamplingParams
from jaxserve.validation import require

MAX_BAD_WORDS = 128  # of several tokens; those of one token are masked for good and do not count
MAX_BAD_WORD_TOKENS = 16
MAX_STOP_IDS = 64  # of a request with min_tokens

Encode = Callable[[str], list[int]]


class LogitsTables(NamedTuple):
    """`bias` is added to the logits (-inf: never), None for nothing; `bad_words` are sequences of at least two tokens
    of which the last must not follow the others; `stop_ids` are not sampled before min_tokens."""

    bias: np.ndarray | None  # float32 [vocab]
    bad_words: list[list[int]]
    stop_ids: list[int]

    def pack(self, slot: int, vocab: int) -> np.ndarray:
        """One int32 buffer [packed_tables_size(vocab)] for `processing.set_tables`."""
        packed = np.zeros(packed_tables_size(vocab), np.int32)
        packed[0] = slot
        bias, words, stops = np.split(packed[1:], np.cumsum([vocab, MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS]))
        if self.bias is not None:
            bias.view(np.float32)[:] = self.bias
        words[:] = -1
        for row, word in zip(words.reshape(MAX_BAD_WORDS, -1), self.bad_words, strict=False):
            row[-len(word) :] = word
        stops[:] = vocab
        stops[: len(self.stop_ids)] = self.stop_ids
        return packed


def packed_tables_size(vocab: int) -> int:
    """int32 values of packed tables."""
    return 1 + vocab + MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS + MAX_STOP_IDS


def build_tables(
    params: SamplingParams, vocab: int, stop_ids: Collection[int], encode: Encode | None
) -> LogitsTables | None:
    """The tables of a request, or None if it needs none. ValueError for what leaves no token or does not fit."""
    if not params.needs_tables:
        return None
    words = _bad_word_sequences(params.bad_words, encode)
    single = {word[0] for word in words if len(word) == 1}
    longer = [word for word in words if len(word) > 1]
    rule = f"at most {MAX_BAD_WORDS} sequences of tokens (a word may be two, with and without a space)"
    require(len(longer) <= MAX_BAD_WORDS, "bad_words", params.bad_words, rule)
    too_long = next((word for word in longer if len(word) > MAX_BAD_WORD_TOKENS), None)
    require(too_long is None, "bad_words", params.bad_words, f"texts of at most {MAX_BAD_WORD_TOKENS} tokens")
    early = sorted(stop_ids) if params.min_tokens else []
    rule = f"at most {MAX_STOP_IDS} ids, the model's own included, together with min_tokens"
    require(len(early) <= MAX_STOP_IDS, "stop_token_ids", params.stop_token_ids, rule)

    left = set(range(vocab)) if params.allowed_token_ids is None else set(params.allowed_token_ids)
    require(bool(left - single), "bad_words", params.bad_words, "such that some token is still allowed")
    rule = f"such that tokens other than the stop tokens {early} are allowed, since min_tokens={params.min_tokens}"
    require(bool(left - single - set(early)), "allowed_token_ids", params.allowed_token_ids, rule)
    return LogitsTables(_bias(params, vocab, single), longer, early)


def _bias(params: SamplingParams, vocab: int, never: Iterable[int]) -> np.ndarray | None:
    never = list(never)
    if not (params.logit_bias or never or params.allowed_token_ids is not None):
        return None
    bias = np.zeros(vocab, np.float32)
    for token, value in (params.logit_bias or {}).items():
        bias[token] = value
    bias[never] = -np.inf
    if params.allowed_token_ids is not None:
        forbidden = np.ones(vocab, bool)
        forbidden[list(params.allowed_token_ids)] = False
        bias[forbidden] = -np.inf
    return bias


def _bad_word_sequences(texts: Iterable[str], encode: Encode | None) -> list[list[int]]:
    """Each text as tokens, at the start of a word and within one, as vLLM does."""
    sequences: dict[tuple[int, ...], None] = {}
    for text in texts:
        for spelling in (text.lstrip(), " " + text.lstrip()):
            if ids := encode(spelling):
                sequences[tuple(ids)] = None
    return [list(ids) for ids in sequences]
