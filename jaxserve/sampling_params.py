"""What a request may ask of the sampler. A leaf: knows no JAX and no engine."""

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, no_type_check

from jaxserve.validation import check_names, is_integer, is_number, require

MAX_LOGPROBS = 20
MAX_BRANCHES = 128
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@no_type_check  # it checks itself: the tests' type checker would come first with another error
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters with vLLM's names, meanings and defaults; ValueError where a value breaks a rule.

    The filters act on the distribution after the temperature, in the order min_p, top_k, top_p (top_p on
    what the others left, renormalised); tokens that tie with the last one kept are kept too.

    Attributes:
        temperature: 0 is greedy (the lowest id of the largest logit), and so is everything below 0.01.
        top_k: the number of tokens kept; 0 or -1 keeps all.
        top_p: a token is kept while the probability of the likelier ones is below top_p; in (0, 1].
        min_p: the least probability kept, relative to that of the likeliest token; in [0, 1].
        seed: any int64; None lets the engine choose one.
        max_tokens: None means as many as the context allows.
        stop_token_ids: ids that end the request, besides the model's own unless `ignore_eos`.
        logprobs: the number of most likely tokens reported beside the sampled one; None reports nothing.
        n: the number of continuations; each has a seed of its own (`child_seed`).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: tuple[int, ...] = ()  # a list is taken too
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self):
        self._check_distribution()
        self._check_lengths()
        self._check_stops()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Builds from outside data (JSON, YAML); an unknown name is refused with the nearest right one."""
        check_names(cls, values)
        return cls(**values)

    def _check_distribution(self) -> None:
        def number(field: str, allowed: Callable[[float], bool], rule: str) -> None:
            value = getattr(self, field)
            require(is_number(value) and allowed(value), field, value, rule)
            object.__setattr__(self, field, float(value))

        number("temperature", lambda value: value >= 0, "a finite number of at least 0")
        number("top_p", lambda value: 0 < value <= 1, "a number above 0 and at most 1")
        number("min_p", lambda value: 0 <= value <= 1, "a number from 0 to 1")
        valid = is_integer(self.top_k) and -1 <= self.top_k <= INT32_MAX
        require(valid, "top_k", self.top_k, "an integer of at least 1, or 0 or -1 to keep every token")
        valid = self.seed is None or (is_integer(self.seed) and INT64_MIN <= self.seed <= INT64_MAX)
        require(valid, "seed", self.seed, "None or an integer of 64 bits, sign included")

    def _check_lengths(self) -> None:
        valid = self.max_tokens is None or (is_integer(self.max_tokens) and 1 <= self.max_tokens <= INT32_MAX)
        require(valid, "max_tokens", self.max_tokens, "None or an integer of at least 1")
        valid = self.logprobs is None or (is_integer(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS)
        require(valid, "logprobs", self.logprobs, f"None or an integer from 0 to {MAX_LOGPROBS}")
        valid = is_integer(self.n) and 1 <= self.n <= MAX_BRANCHES
        require(valid, "n", self.n, f"an integer from 1 to {MAX_BRANCHES}")

    def _check_stops(self) -> None:
        rule = "a list or tuple of token ids (integers of at least 0)"
        ids = self.stop_token_ids
        require(isinstance(ids, list | tuple), "stop_token_ids", ids, rule)
        require(all(is_integer(i) and 0 <= i <= INT32_MAX for i in ids), "stop_token_ids", ids, rule)
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")


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
