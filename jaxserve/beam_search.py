"""Beam search: the likeliest continuations of a prompt, as transformers searches for them. Knows no engine.

Every step ranks what the model says after each beam. The engine computes one token of each beam as a request of its
own: the prefix cache shares the full pages of the beams' common past, and a beam that forks needs nothing copied but
the tokens of its last page, which are computed again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, no_type_check

from jaxserve.outputs import BeamSequence, Logprob, RequestOutput
from jaxserve.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.validation import is_integer, is_number, require

MAX_BEAMS = 64


@no_type_check  # it checks itself: the tests' type checker would come first with another error
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """vLLM's names, and transformers' `early_stopping`; ValueError where a value breaks a rule.

    Attributes:
        beam_width: how many beams are followed, and how many continuations come out.
        max_tokens: the longest continuation.
        ignore_eos: whether the model's end of sequence ends nothing.
        length_penalty: a finished beam's score is its log-probability / length ** length_penalty.
        early_stopping: True stops when `beam_width` beams are finished; False when no running beam can be better by
            its score so far; "never" when none can be, whatever follows.
    """

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self):
        valid = is_integer(self.beam_width) and 1 <= self.beam_width <= MAX_BEAMS
        require(valid, "beam_width", self.beam_width, f"an integer from 1 to {MAX_BEAMS}")
        require(is_integer(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        require(is_number(self.length_penalty), "length_penalty", self.length_penalty, "a finite number")
        known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        require(known, "early_stopping", self.early_stopping, "True, False or 'never'")


class Beam(NamedTuple):
    """A continuation and its log-probability."""

    token_ids: tuple[int, ...]
    logprob: float


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
        logprobs = wanted if wanted <= MAX_LOGPROBS else -1
        return SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=logprobs)

    def advance(self, following: Sequence[Mapping[int, Logprob]]) -> None:
        """One step: the log-probabilities after each running beam, at least those of the likeliest candidates."""
        params, width = self._params, self._params.beam_width
        ranked = [
            Beam((*beam.token_ids, token), beam.logprob + entry.logprob)
            for beam, entries in zip(self.running, following, strict=True)
            for token, entry in entries.items()
        ]
        ranked = sorted(ranked, key=lambda beam: -beam.logprob)[: self.num_candidates]
        length = len(ranked[0].token_ids)
        ends = [beam.token_ids[-1] in self._end_ids or length >= self._max_tokens for beam in ranked]
        full = len(self.finished) == width
        if not (full and params.early_stopping is True):
            new = [self._sequence(beam) for beam, end in zip(ranked[:width], ends[:width], strict=True) if end]
            self.finished = sorted([*self.finished, *new], key=lambda sequence: -sequence.score)[:width]
        self.running = [beam for beam, end in zip(ranked, ends, strict=True) if not end][:width]
        full = len(self.finished) == width
        self.done = not self.running or (full and (params.early_stopping is True or not self._may_improve(length)))

    def _may_improve(self, length: int) -> bool:
        """Whether the best running beam could still be better than the worst finished one."""
        penalty = self._params.length_penalty
        longest = self._params.early_stopping == "never" and penalty > 0
        best = self.running[0].logprob / (self._max_tokens if longest else length) ** penalty
        return best > self.finished[-1].score

    def _sequence(self, beam: Beam) -> BeamSequence:
        reason = "stop" if beam.token_ids[-1] in self._end_ids else "length"
        score = beam.logprob / len(beam.token_ids) ** self._params.length_penalty
        return BeamSequence(list(beam.token_ids), "", beam.logprob, score, reason)


def search_all(
    prompts: Sequence[Mapping[str, Any]],
    searches: Sequence[BeamSearch],
    generate: Callable[[list[dict[str, Any]], SamplingParams], list[RequestOutput]],
    vocab: int,
) -> None:
    """Run the searches, one for each prompt (as `InputProcessor.check` returns it), to their ends."""
    while running := [pair for pair in zip(prompts, searches, strict=True) if not pair[1].done]:
        asked = [
            {key: value for key, value in prompt.items() if key != "prompt"}
            | {"prompt_token_ids": [*prompt["prompt_token_ids"], *beam.token_ids]}
            for prompt, search in running
            for beam in search.running
        ]
        outputs = [result.outputs[0] for result in generate(asked, searches[0].request_params(vocab))]
        if wrong := next((output.error for output in outputs if output.error is not None), None):
            raise RuntimeError(wrong)
        following = iter([output.logprobs[0] for output in outputs])
        for _, search in running:
            search.advance([next(following) for _ in search.running])
