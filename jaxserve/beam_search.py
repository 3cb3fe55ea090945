"""Beam search: the likeliest continuations of a prompt, as transformers searches for them. Knows no engine.

Every step ranks what the model says after each beam. In the engine a beam is a request of one token, and those that
go on from it are its forks: they share its pages, and who writes to a shared one gets a copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float, Int

from jaxserve.outputs import BeamSearchOutput, BeamSequence, RequestOutput
from jaxserve.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.validation import is_integer, is_number, require

MAX_BEAMS = 64


@no_type_check  # it checks itself: the tests' type checker would come first with another error
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """vLLM's names, and transformers' `early_stopping`; ValueError where a value breaks a rule.

    Attributes:
        beam_width: how many beams are followed.
        n: how many continuations come out, the best first; None is all.
        max_tokens: the longest continuation.
        ignore_eos: whether the model's end of sequence ends nothing.
        length_penalty: a finished beam's score is its log-probability / length ** length_penalty.
        early_stopping: True stops when `beam_width` beams are finished; False when no running beam can be better by
            its score so far; "never" when none can be, whatever follows.
        priority: as in SamplingParams.
        cache_salt: likewise.
        tenant: likewise.
    """

    beam_width: int
    n: int | None = None
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""

    def __post_init__(self):
        valid = is_integer(self.beam_width) and 1 <= self.beam_width <= MAX_BEAMS
        require(valid, "beam_width", self.beam_width, f"an integer from 1 to {MAX_BEAMS}")
        valid = self.n is None or (is_integer(self.n) and 1 <= self.n <= self.beam_width)
        require(valid, "n", self.n, f"None or an integer from 1 to beam_width={self.beam_width}")
        require(is_integer(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        require(is_number(self.length_penalty), "length_penalty", self.length_penalty, "a finite number")
        known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        require(known, "early_stopping", self.early_stopping, "True, False or 'never'")
        self.sampling_params(0)

    def sampling_params(self, logprobs: int) -> SamplingParams:
        """What the engine computes for each beam: the log-probabilities of the next token."""
        shared = {name: getattr(self, name) for name in ("priority", "cache_salt", "tenant")}
        return SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=logprobs, **shared)

    def score(self, logprob: float, length: int) -> float:
        """By what finished beams are compared."""
        return logprob / length**self.length_penalty


class Beam(NamedTuple):
    """A continuation, its log-probability, and the place among the beams before it of the one that it goes on from."""

    token_ids: tuple[int, ...]
    logprob: float
    parent: int = 0


class Following(NamedTuple):
    """The likeliest next tokens after a beam, in order, and their log-probabilities."""

    token_ids: Int[np.ndarray, " candidates"]
    logprobs: Float[np.ndarray, " candidates"]


def likeliest(logprobs: Float[np.ndarray, " vocab"], count: int) -> Following:
    """The `count` likeliest tokens, of equal ones the lowest first."""
    count = min(count, len(logprobs))
    least = np.partition(logprobs, -count)[-count]
    ids = np.flatnonzero(logprobs >= least)
    ids = ids[np.argsort(-logprobs[ids], kind="stable")[:count]]
    return Following(ids, logprobs[ids])


class BeamSearch:
    """The search from one prompt. `running` are the beams whose next tokens `advance` wants to hear of."""

    def __init__(self, params: BeamSearchParams, end_ids: frozenset[int], max_tokens: int):
        """`end_ids` end a beam; `max_tokens` is what the context leaves of the parameters' own."""
        self._params, self._end_ids, self._max_tokens = params, end_ids, max_tokens
        self.running = [Beam((), 0.0)]
        self.finished: list[BeamSequence] = []
        self.done = False

    @property
    def num_candidates(self) -> int:
        """How many next tokens of each beam are looked at: however many of them end, enough go on."""
        return max(2, 1 + len(self._end_ids)) * self._params.beam_width

    def request_params(self, vocab: int) -> SamplingParams:
        """What to ask of the model after each running beam."""
        wanted = min(self.num_candidates, vocab)
        return self._params.sampling_params(wanted if wanted <= MAX_LOGPROBS else -1)

    def advance(self, following: Sequence[Following]) -> None:
        """One step: what may follow each running beam, `num_candidates` tokens or all there are."""
        params, width = self._params, self._params.beam_width
        ranked = self._ranked(following)
        length = len(ranked[0].token_ids)
        ends = [beam.token_ids[-1] in self._end_ids or length >= self._max_tokens for beam in ranked]
        full = len(self.finished) == width
        if not (full and params.early_stopping is True):
            new = [self._sequence(beam) for beam, end in zip(ranked[:width], ends[:width], strict=True) if end]
            self.finished = sorted([*self.finished, *new], key=lambda sequence: -sequence.score)[:width]
        self.running = [beam for beam, end in zip(ranked, ends, strict=True) if not end][:width]
        full = len(self.finished) == width
        self.done = not self.running or (full and (params.early_stopping is True or not self._may_improve(length)))

    def _ranked(self, following: Sequence[Following]) -> list[Beam]:
        """The best candidates of all beams."""
        pairs = list(zip(self.running, following, strict=True))
        parents = np.repeat(np.arange(len(pairs)), [len(after.token_ids) for _, after in pairs])
        tokens = np.concatenate([after.token_ids for _, after in pairs])
        logprobs = np.concatenate([beam.logprob + after.logprobs.astype(np.float64) for beam, after in pairs])
        best = np.argsort(-logprobs, kind="stable")[: self.num_candidates].tolist()
        return [
            Beam((*self.running[parents[at]].token_ids, int(tokens[at])), float(logprobs[at]), int(parents[at]))
            for at in best
        ]

    def _may_improve(self, length: int) -> bool:
        """Whether the best running beam could still be better than the worst finished one."""
        penalty = self._params.length_penalty
        longest = self._params.early_stopping == "never" and penalty > 0
        best = self.running[0].logprob / (self._max_tokens if longest else length) ** penalty
        return best > self.finished[-1].score

    def _sequence(self, beam: Beam) -> BeamSequence:
        reason = "stop" if beam.token_ids[-1] in self._end_ids else "length"
        score = self._params.score(beam.logprob, len(beam.token_ids))
        return BeamSequence(list(beam.token_ids), "", beam.logprob, score, reason)

    @property
    def results(self) -> list[BeamSequence]:
        """What comes out when the search is done."""
        return self.finished[: self._params.n]


def beams_of(result: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
    """The beams in the result of a request with `params`. RuntimeError if the search failed."""
    wrong = next((output.error for output in result.outputs if output.error is not None), None)
    if wrong is not None:
        raise RuntimeError(wrong)
    sequences = [
        BeamSequence(o.token_ids, o.text, o.cumulative_logprob, score, o.finish_reason)
        for o in result.outputs
        for score in [params.score(o.cumulative_logprob, len(o.token_ids))]
    ]
    return BeamSearchOutput(result.prompt_token_ids, sequences)
