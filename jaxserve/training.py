"""What a training loop needs beside the engine: the trainer's log-probabilities, and how far the engine's are off.

Both sides report the raw distribution (temperature 1, no filters). They differ by rounding, by the dtype, and by
stale weights; reinforcement learning has to know by how much, since its importance ratios are exp(difference).
"""

from collections.abc import Sequence
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from jaxserve.models.decoder import Decoder
from jaxserve.outputs import CompletionOutput
from jaxserve.validation import is_number, require


class LogprobReport(NamedTuple):
    """How the trainer's log-probabilities of sampled tokens differ from the engine's.

    d = trainer - engine, per token, and r = exp(d) is the importance ratio. The KL divergence of the trainer's
    distribution from the engine's is estimated from the engine's samples (Schulman, "Approximating KL divergence",
    2020): `kl_k1` is the mean of -d (unbiased, can be negative), `kl_k3` that of r - 1 - d (unbiased, never negative).
    `clipped_share` is the share of tokens whose r leaves [1 - epsilon, 1 + epsilon].
    """

    num_tokens: int
    mean_abs_difference: float
    max_abs_difference: float
    kl_k1: float
    kl_k3: float
    clipped_share: float


@no_type_check  # it checks itself: the tests' type checker would come first with another error
def logprob_report(trainer_logprobs, engine_logprobs, *, epsilon: float = 0.2, mask=None) -> LogprobReport:
    """Compare log-probabilities of the same sampled tokens: arrays of one shape, masked (True counts) if asked.

    ValueError for different shapes, no tokens, or values that are not finite.
    """
    require(is_number(epsilon) and epsilon > 0, "epsilon", epsilon, "a number above 0")
    trainer, engine = (np.asarray(values, np.float64) for values in (trainer_logprobs, engine_logprobs))
    counts = np.ones(trainer.shape, bool) if mask is None else np.asarray(mask, bool)
    for name, values in (("engine_logprobs", engine), ("mask", counts)):
        require(values.shape == trainer.shape, name, values.shape, f"of the trainer's shape {trainer.shape}")
    trainer, engine = trainer[counts], engine[counts]
    require(trainer.size > 0, "trainer_logprobs", trainer, "of at least one token")
    for name, values in (("trainer_logprobs", trainer), ("engine_logprobs", engine)):
        require(bool(np.isfinite(values).all()), name, values[~np.isfinite(values)][:4].tolist(), "finite")
    difference = trainer - engine
    return LogprobReport(
        num_tokens=difference.size,
        mean_abs_difference=float(np.abs(difference).mean()),
        max_abs_difference=float(np.abs(difference).max()),
        kl_k1=float(-difference.mean()),
        kl_k3=float((np.expm1(difference) - difference).mean()),
        clipped_share=float((np.abs(np.expm1(difference)) > epsilon).mean()),
    )


def sequence_logprobs(model: Decoder, token_ids: Int[Array, " tokens"]) -> Float32[Array, " tokens_minus_1"]:
    """log p(token i+1 | tokens 0..i) of one sequence, for every i but the last, by dense attention.

    A pure function of the model and the ids, for `nnx.jit`, `nnx.grad` and `nnx.vmap`. Attention is causal, so
    padding at the end changes nothing before it.
    """
    token_ids = token_ids.astype(jnp.int32)
    hidden = model(token_ids, jnp.arange(token_ids.shape[0], dtype=jnp.int32))
    logprobs = jax.nn.log_softmax(model.logits(hidden[:-1]))
    return jnp.take_along_axis(logprobs, token_ids[1:, None], axis=1)[:, 0]


def output_logprobs(output: CompletionOutput) -> Float32[np.ndarray, " tokens"]:
    """The engine's log-probabilities of an answer's tokens; the request must have asked for `logprobs`."""
    if output.logprobs is None:
        raise ValueError("output.logprobs: None: the request must set SamplingParams(logprobs=0) or more")
    pairs: Sequence = list(zip(output.token_ids, output.logprobs, strict=True))
    return np.array([entry[token].logprob for token, entry in pairs], np.float32)
