"""What the device remembers of each running request: a donated tree of arrays with one row per slot.

Padding rows use the slot number `num_slots`: reads clip, writes drop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from jaxserve.sampling.sampler import SamplingRows
from jaxserve.sampling_params import SamplingParams, seed_words

_HEADER = 10  # int32 values in front of the token history in a packed admission


class Slots(NamedTuple):
    """Lengths are in tokens; `num_computed` is also the position of the next token to compute.

    history: token ids, known ones from `admit`, sampled ones from the head
    write_start: keys and values before this position are shared and are not written
    page_table: one group of layers today; sliding-window layers may get their own
    """

    history: Int32[Array, "slots max_len"]
    num_computed: Int32[Array, " slots"]
    write_start: Int32[Array, " slots"]
    page_table: Int32[Array, "groups slots max_pages"]
    temperature: Float32[Array, " slots"]
    top_k: Int32[Array, " slots"]
    top_p: Float32[Array, " slots"]
    min_p: Float32[Array, " slots"]
    seed: UInt32[Array, "slots 2"]
    num_logprobs: Int32[Array, " slots"]

    @property
    def num_slots(self) -> int:
        return self.history.shape[0]

    def sampling_rows(self, slots: Int32[Array, " rows"]) -> SamplingRows:
        """The sampling parameters of some slots."""
        take = lambda values: values.at[slots].get(mode="clip")
        return SamplingRows(
            temperature=take(self.temperature),
            top_k=take(self.top_k),
            top_p=take(self.top_p),
            min_p=take(self.min_p),
            seed=take(self.seed),
            wants_logprobs=take(self.num_logprobs),
        )


def allocate(num_slots: int, max_len: int, max_pages: int) -> Slots:
    """Empty slots: all zeros."""
    row = lambda dtype, *shape: jnp.zeros((num_slots, *shape), dtype)
    return Slots(
        history=row(jnp.int32, max_len),
        num_computed=row(jnp.int32),
        write_start=row(jnp.int32),
        page_table=jnp.zeros((1, num_slots, max_pages), jnp.int32),
        temperature=row(jnp.float32),
        top_k=row(jnp.int32),
        top_p=row(jnp.float32),
        min_p=row(jnp.float32),
        seed=row(jnp.uint32, 2),
        num_logprobs=row(jnp.int32),
    )


def packed_admission_size(max_len: int, max_pages: int) -> int:
    """int32 values of a packed admission."""
    return _HEADER + max_len + max_pages


def pack_admission(
    slot: int,
    token_ids: list[int],
    pages: list[int],
    num_computed: int,
    write_start: int,
    params: SamplingParams,
    seed: int,
    max_len: int,
    max_pages: int,
) -> np.ndarray:
    """Everything `admit` needs, as one int32 buffer; floats by their bits."""
    packed = np.zeros(packed_admission_size(max_len, max_pages), np.int32)
    packed[:3] = slot, num_computed, write_start
    packed[3:6].view(np.float32)[:] = params.temperature, params.top_p, params.min_p
    packed[6] = max(params.top_k, 0)
    packed[7] = -1 if params.logprobs is None else params.logprobs
    packed[8:10].view(np.uint32)[:] = seed_words(seed)
    packed[_HEADER : _HEADER + len(token_ids)] = token_ids
    packed[_HEADER + max_len : _HEADER + max_len + len(pages)] = pages
    return packed


def admit(slots: Slots, packed: Int32[Array, " size"]) -> Slots:
    """The slots with one of them filled: a new request, a prefix hit, or one that comes back after preemption."""
    slot = packed[0]
    max_len = slots.history.shape[1]
    as_float = lambda value: jax.lax.bitcast_convert_type(value, jnp.float32)
    rows = {
        "num_computed": packed[1],
        "write_start": packed[2],
        "temperature": as_float(packed[3]),
        "top_p": as_float(packed[4]),
        "min_p": as_float(packed[5]),
        "top_k": packed[6],
        "num_logprobs": packed[7],
        "seed": jax.lax.bitcast_convert_type(packed[8:10], jnp.uint32),
        "history": packed[_HEADER : _HEADER + max_len],
    }
    filled = {name: getattr(slots, name).at[slot].set(value) for name, value in rows.items()}
    filled["page_table"] = slots.page_table.at[:, slot].set(packed[_HEADER + max_len :])
    return Slots(**filled)
