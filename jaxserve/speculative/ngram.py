"""Prompt lookup: what followed the last tokens when they last occurred is proposed again.

Source: "prompt lookup decoding" (A. Saxena, 2023); names as in vLLM (`prompt_lookup_min`, `prompt_lookup_max`).
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxserve.config import SpeculativeConfig


@dataclass(frozen=True)
class NgramProposer:
    """Looks for the last `longest` to `shortest` tokens and proposes the `count` tokens that followed them."""

    shortest: int
    longest: int
    count: int

    @classmethod
    def of(cls, config: SpeculativeConfig | None) -> "NgramProposer | None":
        """The one that a configuration asks for; None where nothing is looked up."""
        if config is None or not config.prompt_lookup:
            return None
        return cls(config.prompt_lookup_min, config.prompt_lookup_max, config.num_speculative_tokens)

    def propose(
        self, history: Int32[Array, "slots max_len"], length: Int32[Array, " slots"]
    ) -> tuple[Int32[Array, "slots count"], Bool[Array, " slots"]]:
        """`count` tokens for each slot, and whether it has a match at all, from its first `length` tokens.

        The longest match wins, of equally long ones the most recent. Where a match runs into the end, it goes on with
        its own proposal: a text that repeats itself is expected to go on doing so.
        """
        max_len = history.shape[1]
        at = jnp.arange(max_len, dtype=jnp.int32)
        last = length - 1
        matched = jnp.zeros(history.shape, jnp.int32)  # how many tokens up to here equal the last ones
        going_on = jnp.ones(history.shape, bool)
        for back in range(self.longest):
            tail = jnp.take_along_axis(history, jnp.maximum(last - back, 0)[:, None], axis=1)
            shifted = jnp.pad(history, ((0, 0), (back, 0)), constant_values=-1)[:, :max_len]
            going_on &= (shifted == tail) & (last >= back)[:, None]
            matched += going_on.astype(jnp.int32)
        candidate = (matched >= self.shortest) & (at < last[:, None])
        rank = jnp.where(candidate, matched * max_len + at, -1)
        best = jnp.argmax(rank, axis=1).astype(jnp.int32)
        found = jnp.take_along_axis(rank, best[:, None], axis=1)[:, 0] >= 0
        period = jnp.maximum(last - best, 1)
        ahead = jnp.arange(self.count, dtype=jnp.int32)[None] % period[:, None]
        source = jnp.clip(best[:, None] + 1 + ahead, 0, max_len - 1)
        return jnp.take_along_axis(history, source, axis=1), found
