"""What items ask of an engine and what comes of it. Plain data: it goes to other processes. Knows no JAX."""

from dataclasses import dataclass, field
from typing import Any

from jaxserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class Work:
    """What one item asks of an engine.

    kind: `generate` samples with `params`; `score` gives log-likelihoods of `answers` after the prompt; `perplexity`
        that of the prompt's own tokens, in windows of `window` tokens that go on by `stride`.
    prompt: a text, or messages for the chat template.
    """

    key: Any
    kind: str
    prompt: str | list[dict[str, str]]
    answers: tuple[str, ...] = ()
    params: SamplingParams | None = None
    window: int | None = None
    stride: int | None = None


@dataclass(frozen=True)
class Result:
    """What came of it. `values` go into the item's line; `error` says why there are none."""

    key: Any
    values: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
