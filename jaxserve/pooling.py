"""From the hidden states of a prompt to one vector. Host side only; knows no JAX and no schedule."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxserve.outputs import EmbeddingOutput, RequestOutput
from jaxserve.pooling_params import PoolingParams


@dataclass(frozen=True)
class Pooler:
    """How a model's embeddings are made: `pooling_type` of `config.POOLING_TYPES`, over hidden states of this size."""

    pooling_type: str
    normalize: bool
    hidden_size: int


class PooledPrompt:
    """What has been pooled of a prompt's hidden states so far.

    They are taken one by one in the order of their positions and added in float64, so that the sum has the same bits
    wherever steps cut the prompt.
    """

    def __init__(self, pooler: Pooler, params: PoolingParams, num_tokens: int):
        self._pooler, self._params, self._num_tokens = pooler, params, num_tokens
        self.restart()

    def restart(self) -> None:
        """Forget what has been taken."""
        self._sum = np.zeros(self._pooler.hidden_size)
        self._next = self._first

    @property
    def _first(self) -> int:
        return self._num_tokens - 1 if self._pooler.pooling_type == "LAST" else 0

    @property
    def next_position(self) -> int | None:
        """The position of the next hidden state that is wanted; None when all are there."""
        return self._next if self._next < self._num_tokens else None

    def take(self, first: int, rows: Float[np.ndarray, "positions hidden"]) -> None:
        """Take the hidden states of positions from `first` on, unless they were taken before."""
        if first == self._next:
            self._sum = np.add.reduce(np.concatenate([self._sum[None], rows.astype(np.float64)]), axis=0)
            self._next += len(rows)

    def embedding(self) -> Float[np.ndarray, " dimensions"]:
        """The embedding in float32, when all hidden states are there."""
        vector = (self._sum / (self._num_tokens - self._first))[: self._params.dimensions]
        normalize = self._pooler.normalize if self._params.normalize is None else self._params.normalize
        if normalize:
            vector = vector / max(math.sqrt(math.fsum(vector * vector)), 1e-12)
        return vector.astype(np.float32)


def embedding_of(result: RequestOutput) -> EmbeddingOutput:
    """The embedding in the result of a request with `PoolingParams`."""
    [output] = result.outputs
    return EmbeddingOutput(result.embedding, result.prompt_token_ids, result.num_cached_tokens, output.error)
