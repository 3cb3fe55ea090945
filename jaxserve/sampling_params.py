"""What a request may ask of the sampler. A leaf: knows no JAX and no engine."""

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, no_type_check

from jaxserve.structured.params import StructuredOutputsParams
from jaxserve.validation import check_names, is_integer, is_number, lone_surrogate, require

MAX_LOGPROBS = 20
MAX_BRANCHES = 128
COLDEST = 0.01  # a lower temperature is greedy
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@no_type_check  # it checks itself: the tests' type checker would come first with another error
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters with vLLM's names, meanings and defaults; ValueError where a value breaks a rule.

    What changes the logits acts in this order: `allowed_token_ids`, `bad_words`, `min_tokens`, `logit_bias`, penalties.
    The filters act on the distribution after the temperature, in the order min_p, top_k, top_p (top_p on
    what the others left, renormalised); tokens that tie with the last one kept are kept too.

    Attributes:
        temperature: 0 is greedy (the lowest id of the largest logit), and so is everything below 0.01.
        top_k: the number of tokens kept; 0 or -1 keeps all.
        top_p: a token is kept while the probability of the likelier ones is below top_p; in (0, 1].
        min_p: the least probability kept, relative to that of the likeliest token; in [0, 1].
        seed: any int64; None lets the engine choose one.
        repetition_penalty: divides positive and multiplies negative logits of tokens that stand in the prompt or
            the output; above 0, 1 is off.
        presence_penalty: subtracted from the logits of tokens that stand in the output; in [-2, 2].
        frequency_penalty: likewise, times the number of occurrences; in [-2, 2].
        logit_bias: {token id: added to its logit, in [-100, 100]}; ids may be strings of digits, as in JSON.
        allowed_token_ids: no other tokens are sampled; None allows all.
        bad_words: texts that are never completed, with or without a space before them.
        max_tokens: None means as many as the context allows; 0 only computes the prompt (scoring).
        min_tokens: neither stop strings nor stop tokens nor the end of sequence end the output before so many.
        stop: a string or several that end the output; text that may become one is held back.
        stop_token_ids: ids that end the request, besides the model's own unless `ignore_eos`.
        include_stop_str_in_output: whether the text ends with what stopped it.
        skip_special_tokens: whether special tokens are left out of the text.
        logprobs: the number of most likely tokens reported beside the sampled one, -1 for the whole vocabulary;
            None reports nothing. Of the raw distribution, before anything above.
        prompt_logprobs: the same for the tokens of the prompt.
        prompt_logprobs_start: prompt tokens before this position get None (they cost nothing, and their
            pages may come from the prefix cache).
        n: the number of continuations; each has a seed of its own (`child_seed`).
        priority: lower goes first, under the scheduling policies `priority` and `fair` (within a tenant).
        cache_salt: cached prefixes are shared only between requests of the same salt.
        speculative: False keeps a request without drafts where the engine speculates. The tokens are the same.
        tenant: whose request it is, under the scheduling policy `fair`.
        structured_outputs: a form that the output must have (a `StructuredOutputsParams` or a dict of its fields). An
            output ends where its form allows no more, `min_tokens` or not; `max_tokens` may cut it before that.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # lists are taken too
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    speculative: bool = True
    tenant: str = ""
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self):
        self._check_distribution()
        self._check_lengths()
        self._check_tokens()
        self._check_texts()
        for field in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "speculative"):
            require(isinstance(getattr(self, field), bool), field, getattr(self, field), "True or False")
        object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        valid = is_integer(self.priority) and INT64_MIN <= self.priority <= INT64_MAX
        require(valid, "priority", self.priority, "an integer of 64 bits, sign included")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Builds from outside data (JSON, YAML); an unknown name is refused with the nearest right one."""
        check_names(cls, values)
        return cls(**values)

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def needs_tables(self) -> bool:
        """Whether the device needs more than numbers: masks, biases, sequences of tokens."""
        masks = self.logit_bias or self.bad_words or self.allowed_token_ids is not None
        return bool(masks or self.min_tokens)

    @cached_property
    def only_greedy(self) -> bool:
        """Whether the token is the largest logit's and nothing else is asked for."""
        changed = self.has_penalties or self.needs_tables or self.logprobs is not None
        changed = changed or self.structured_outputs is not None
        return self.temperature < COLDEST and not changed

    def _check_distribution(self) -> None:
        def number(field: str, allowed: Callable[[float], bool], rule: str) -> None:
            value = getattr(self, field)
            require(is_number(value) and allowed(value), field, value, rule)
            object.__setattr__(self, field, float(value))

        number("temperature", lambda value: 0 <= value <= FLOAT32_MAX, "a number of at least 0 that float32 can hold")
        number("top_p", lambda value: 0 < value <= 1, "a number above 0 and at most 1")
        number("min_p", lambda value: 0 <= value <= 1, "a number from 0 to 1")
        number("repetition_penalty", lambda value: 1e-6 <= value <= 1e6, "a number above 0 (1e-6 to 1e6)")
        number("presence_penalty", lambda value: -2 <= value <= 2, "a number from -2 to 2")
        number("frequency_penalty", lambda value: -2 <= value <= 2, "a number from -2 to 2")
        valid = is_integer(self.top_k) and -1 <= self.top_k <= INT32_MAX
        require(valid, "top_k", self.top_k, "an integer of at least 1, or 0 or -1 to keep every token")
        valid = self.seed is None or (is_integer(self.seed) and INT64_MIN <= self.seed <= INT64_MAX)
        require(valid, "seed", self.seed, "None or an integer of 64 bits, sign included")

    def _check_lengths(self) -> None:
        def integer(field: str, least: int, most: int, rule: str, none: bool = False) -> None:
            value = getattr(self, field)
            valid = (none and value is None) or (is_integer(value) and least <= value <= most)
            require(valid, field, value, rule)

        integer("max_tokens", 0, INT32_MAX, "None or an integer of at least 0", none=True)
        most = INT32_MAX if self.max_tokens is None else self.max_tokens
        integer("min_tokens", 0, most, f"an integer from 0 to max_tokens={self.max_tokens}")
        for field in ("logprobs", "prompt_logprobs"):
            rule = f"None, an integer from 0 to {MAX_LOGPROBS}, or -1 for the whole vocabulary"
            integer(field, -1, MAX_LOGPROBS, rule, none=True)
        integer("prompt_logprobs_start", 0, INT32_MAX, "an integer of at least 0")
        integer("n", 1, MAX_BRANCHES, f"an integer from 1 to {MAX_BRANCHES}")

    def _check_tokens(self) -> None:
        rule = "a list or tuple of token ids (integers of at least 0)"
        for field in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, field)
            if ids is None and field == "allowed_token_ids":
                continue
            require(isinstance(ids, list | tuple), field, ids, rule)
            require(all(is_integer(i) and 0 <= i <= INT32_MAX for i in ids), field, ids, rule)
            require(bool(ids) or field == "stop_token_ids", field, ids, "None or hold at least one token id")
            object.__setattr__(self, field, tuple(ids))
        if self.logit_bias is not None:
            rule = "None or a dict of token ids (integers of at least 0) to numbers from -100 to 100"
            require(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, rule)
            bias = {_as_id(key): value for key, value in self.logit_bias.items()}
            require(None not in bias and len(bias) == len(self.logit_bias), "logit_bias", self.logit_bias, rule)
            valid = all(is_number(value) and -100 <= value <= 100 for value in bias.values())
            require(valid, "logit_bias", self.logit_bias, rule)
            object.__setattr__(self, "logit_bias", bias)

    def _check_texts(self) -> None:
        for field in ("stop", "bad_words"):
            texts = getattr(self, field)
            texts = (texts,) if isinstance(texts, str) and field == "stop" else () if texts is None else texts
            rule = "a list or tuple of texts that are not empty" + (", or one such text" if field == "stop" else "")
            filled = (lambda text: text.strip()) if field == "bad_words" else bool  # a space may end a text
            valid = isinstance(texts, list | tuple) and all(isinstance(t, str) and filled(t) for t in texts)
            require(valid and all(lone_surrogate(text) is None for text in texts), field, getattr(self, field), rule)
            object.__setattr__(self, field, tuple(texts))
        salt = "" if self.cache_salt is None else self.cache_salt
        require(isinstance(salt, str) and lone_surrogate(salt) is None, "cache_salt", salt, "a text")
        object.__setattr__(self, "cache_salt", salt)
        require(isinstance(self.tenant, str), "tenant", self.tenant, "a text")


def _as_id(key: Any) -> int | None:
    """A token id given as an integer or, as JSON has it, as a string of digits."""
    if isinstance(key, str) and key.isascii() and key.isdigit():
        key = int(key)
    return key if is_integer(key) and 0 <= key <= INT32_MAX else None


def child_seed(seed: int, index: int) -> int:
    """The seed of continuation `index` of a request: the seed itself for 0, else an int64 from a fixed hash.

    SHA-256 of both numbers as little-endian int64, first eight bytes: the same on every machine and version.
    """
    if index == 0:
        return seed
    digest = hashlib.sha256(struct.pack("<qq", seed, index)).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def seed_words(seed: int) -> tuple[int, int]:
    """An int64 seed as the two uint32 words (low, high) that the sampler takes."""
    unsigned = seed % 2**64
    return unsigned % 2**32, unsigned // 2**32
