"""What a request may ask of an embedding. A leaf: knows no JAX and no engine."""

from dataclasses import dataclass
from typing import no_type_check

from jaxserve.sampling_params import SamplingParams
from jaxserve.validation import is_integer, require


@no_type_check  # it checks itself: the tests' type checker would come first with another error
@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """vLLM's names; ValueError where a value breaks a rule.

    Attributes:
        dimensions: how many of the embedding's first numbers are wanted; None wants all. For models that are trained
            for it (Matryoshka embeddings).
        normalize: whether the embedding, cut to `dimensions`, has length 1; None is as the engine's `pooler_config`.
        priority: as in SamplingParams.
        cache_salt: likewise.
        tenant: likewise.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""

    def __post_init__(self):
        valid = self.dimensions is None or (is_integer(self.dimensions) and self.dimensions >= 1)
        require(valid, "dimensions", self.dimensions, "None or an integer of at least 1")
        valid = self.normalize is None or isinstance(self.normalize, bool)
        require(valid, "normalize", self.normalize, "True, False or None")
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """What the engine computes for it: the prompt, and no token."""
        shared = {name: getattr(self, name) for name in ("priority", "cache_salt", "tenant")}
        return SamplingParams(temperature=0, max_tokens=0, **shared)
