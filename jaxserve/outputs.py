"""What comes out: results with vLLM's field names. A leaf: knows no engine."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Logprob(NamedTuple):
    """Log-probability of a token under the raw distribution; `rank` is 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` continuations of a request.

    finish_reason: None while it runs; "stop" (end of sequence or a stop token), "length", "abort" or "error".
    stop_reason: the stop token id or the stop string that ended it, None for the model's own end of sequence.
    logprobs: one dict per token, {token id: Logprob}, the sampled token first; None if not asked for.
    error: what went wrong, if finish_reason is "error".
    weights_versions: for each token the version of the weights that it was sampled with (`Engine.update_params`);
        more than one value means that the weights were replaced while the request ran.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    weights_versions: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def extend(self, delta: "CompletionOutput") -> None:
        """Append what a later step added."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.weights_versions += delta.weights_versions
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
            for token, entry in zip(delta.token_ids, delta.logprobs, strict=True):  # in one order, however they came
                self.cumulative_logprob = (self.cumulative_logprob or 0.0) + entry[token].logprob
        self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error


class RequestMetrics(NamedTuple):
    """When what happened to a request, by `time.monotonic` of its engine's machine; None: it did not. Of `n` branches
    the first that was scheduled and that had a token, and the last token of any."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request, or what one step added to it (from `Engine.step`).

    num_cached_tokens: prompt tokens that came from the prefix cache.
    prompt_logprobs: one dict per prompt token, {token id: Logprob}, the token itself first; None for the first token
        and for those before `prompt_logprobs_start`. None if not asked for; reported once, when all are there.
    metrics: comes with the last output.
    embedding: float32 [dimensions], with the last output of a request with `PoolingParams`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False)
    embedding: np.ndarray | None = None

    def extend(self, delta: "RequestOutput") -> None:
        """Append what a later step added; `outputs` stay sorted by index."""
        known = {output.index: output for output in self.outputs}
        for output in delta.outputs:
            if output.index in known:
                known[output.index].extend(output)
            else:
                self.outputs.append(output)
        self.outputs.sort(key=lambda output: output.index)
        self.finished, self.num_cached_tokens = delta.finished, delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.metrics = delta.metrics
        if delta.embedding is not None:
            self.embedding = delta.embedding


@dataclass(slots=True)
class BeamSequence:
    """One continuation of a beam search; `score` is `cumulative_logprob` under the length penalty."""

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    finish_reason: str  # "stop" or "length"


@dataclass(slots=True)
class BeamSearchOutput:
    """The continuations of one prompt, the best first."""

    prompt_token_ids: list[int]
    sequences: list[BeamSequence]


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of one prompt.

    embedding: float32 [dimensions]; None if it could not be computed, and `error` says why.
    num_cached_tokens: prompt tokens that came from the prefix cache.
    """

    embedding: np.ndarray | None
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    error: str | None = None
