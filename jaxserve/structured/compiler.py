"""Grammars compiled for a tokenizer, by llguidance, and how far an output has come in its grammar.

The compiler knows one token more than the model, which stands for the end of the output: where it is allowed the model
may end as it likes to, by any of its own tokens or, where nothing can follow, by itself.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection
from functools import cached_property
from typing import Any

import llguidance

from jaxserve.structured.grammars import grammar_of
from jaxserve.structured.params import StructuredOutputsParams
from jaxserve.text.tokenizer import Tokenizer

MAX_CACHED = 128
# Steps of the lexer, items and states of one compilation and one mask: work beyond these ends the request, not the
# engine.
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}


class Constraint:
    """Where one output stands in its grammar.

    Attributes:
        matcher: llguidance's, advanced by the tokens that have been committed.
        end_ids: the model's tokens that end an output; allowed where the output may end, and nowhere else.
    """

    def __init__(self, matcher: llguidance.LLMatcher, end_ids: tuple[int, ...]):
        self.matcher, self.end_ids = matcher, end_ids

    def advance(self, token: int) -> bool:
        """Take a committed token. Returns whether nothing can follow it."""
        return self.matcher.consume_token(token) and self.matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Why the grammar cannot say what may come next, or None."""
        return _error_of(self.matcher)


class GrammarCompiler:
    """Compiles what requests ask for, and remembers the last of it. Any thread may call it; it can be pickled."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """`vocab_size` is the model's."""
        self._text, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple, llguidance.LLMatcher] = OrderedDict()

    def __reduce__(self):
        return GrammarCompiler, (self._text, self._vocab_size)

    @cached_property
    def tokenizer(self) -> llguidance.LLTokenizer:
        """The vocabulary as llguidance holds it; making it takes a second where there are 100,000 tokens."""
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(self._text, self._vocab_size)))

    def compile(self, params: StructuredOutputsParams) -> llguidance.LLMatcher:
        """The grammar at its start, not to be advanced: a copy is (`start`). ValueError with the compiler's words."""
        key = _key(params)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        matcher = self._build(params)  # nobody waits for it who asks for another
        with self._lock:
            self._compiled[key] = matcher
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            return matcher

    def start(self, params: StructuredOutputsParams, end_ids: Collection[int]) -> Constraint:
        """An output that has no token yet."""
        return Constraint(self.compile(params).deep_copy(), tuple(sorted(end_ids)))

    def _build(self, params: StructuredOutputsParams) -> llguidance.LLMatcher:
        limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
        grammar = grammar_of(params, self._text.special_tokens)
        matcher = llguidance.LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)
        error = _error_of(matcher)
        if error is None:
            trial = matcher.deep_copy()  # what is too large may show with the first mask only
            trial.compute_bitmask()
            error = _error_of(trial)
        if error is not None:
            raise ValueError(f"structured_outputs: it cannot be compiled: {error}")
        return matcher


def _error_of(matcher: llguidance.LLMatcher) -> str | None:
    if not matcher.is_error():
        return None
    return matcher.get_error().removesuffix("<non-verbose/>").strip().replace("NoExtensionBias", "no output fits it")


def _key(params: StructuredOutputsParams) -> tuple[Any, ...]:
    return tuple(getattr(params, field) for field in params.__dataclass_fields__)


class _Vocabulary:
    """The tokenizer as llguidance asks for it: the bytes of each token, and how the model would write a text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer, self.eos_token_id = tokenizer, vocab_size
        self.tokens = [self._bytes(token) for token in range(vocab_size)] + [b"<end of output>"]
        self.special_token_ids = [*sorted(token for token in tokenizer.special_ids if token < vocab_size), vocab_size]
        self._ids = {text: token for token, text in reversed(list(enumerate(self.tokens[:-1]))) if text}
        for token in self.special_token_ids[:-1]:
            if self._ids.get(self.tokens[token]) == token:
                del self._ids[self.tokens[token]]
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text in the middle of an output; their bytes joined are the text's."""
        if not isinstance(text, str):
            raise TypeError("a text")  # llguidance asks whether bytes would do
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        wanted = text.encode()
        if b"".join(self.tokens[token] for token in ids) == wanted:
            return ids
        return self._longest_first(wanted)  # a tokenizer that writes a space before every text, say

    def _bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token) if token < self._tokenizer.vocab_size else b""

    def _longest_first(self, wanted: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(wanted):
            ends = range(min(len(wanted), at + self._longest), at, -1)
            end = next((end for end in ends if wanted[at:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[wanted[at:end]])
            at = end
        return ids
