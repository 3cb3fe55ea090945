"""What the device remembers of each running request: a donated tree of arrays with one row per slot.

Padding rows use the slot number `num_slots`: reads clip, writes drop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt32

from jaxserve.config import MAX_DRAFT_TOKENS
from jaxserve.kernels_pallas.verify_draft.drafts import DraftLogits
from jaxserve.kernels_pallas.verify_draft.sampler import SamplingRows
from jaxserve.sampling import processing
from jaxserve.sampling.processing import Processing
from jaxserve.sampling.tables import LogitsTables
from jaxserve.sampling_params import SamplingParams, seed_words

# Of a run of certain tokens and drafts any may be the last that counts; the next step needs the state there.
KEPT_STATES = MAX_DRAFT_TOKENS + 1
_HEADER = 17  # int32 values in front of the token history in a packed admission


class Slots(NamedTuple):
    """Lengths are in tokens; `num_computed` is also the position of the next token to compute.

    history: token ids, known ones from `admit`, sampled ones from the head, and behind the last of these drafts
    num_drafts: how many draft tokens there are
    draft_logits: what each of them was sampled from, where verification asks for it: filled by proposers
    write_start: keys and values before this position are shared and are not written
    page_table: one group of layers today; sliding-window layers may get their own
    states: for a draft head, the model's hidden states at the last positions, that of position p at p % KEPT_STATES
    """

    history: Int32[Array, "slots max_len"]
    num_computed: Int32[Array, " slots"]
    num_drafts: Int32[Array, " slots"]
    write_start: Int32[Array, " slots"]
    page_table: Int32[Array, "groups slots max_pages"]
    temperature: Float32[Array, " slots"]
    top_k: Int32[Array, " slots"]
    top_p: Float32[Array, " slots"]
    min_p: Float32[Array, " slots"]
    seed: UInt32[Array, "slots 2"]
    num_logprobs: Int32[Array, " slots"]
    processing: Processing
    draft_logits: Float32[Array, "slots drafts vocab"] | None
    states: Float[Array, "slots kept hidden"] | None

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

    def logits_of_drafts(self, slots: Int32[Array, " rows"], number: Int32[Array, " rows"]) -> DraftLogits | None:
        """What the drafts of these numbers (from 1 on) were sampled from, if that is remembered."""
        if self.draft_logits is None:
            return None
        _, most, vocab = self.draft_logits.shape
        return DraftLogits(self.draft_logits.reshape(-1, vocab), slots * most + number - 1)

    def with_drafts(
        self,
        slots: Int32[Array, " rows"],
        index: Int32[Array, ""],
        position: Int32[Array, " rows"],
        tokens: Int32[Array, " rows"],
        logits: Float32[Array, "rows vocab"],
    ) -> "Slots":
        """Each slot with its `index`-th draft (from 0 on) and what that was sampled from."""
        history = self.history.at[slots, position].set(tokens, mode="drop")
        if self.draft_logits is None:
            return self._replace(history=history)
        kept = self.draft_logits.at[slots, index].set(logits, mode="drop")
        return self._replace(history=history, draft_logits=kept)


def allocate(
    num_slots: int,
    max_len: int,
    max_pages: int,
    vocab: int,
    *,
    draft_logits: int = 0,
    state: jax.ShapeDtypeStruct | None = None,
) -> Slots:
    """Empty slots, which remember the logits of so many drafts, and states like this one, which a draft head goes on
    from."""
    row = lambda dtype, *shape: jnp.zeros((num_slots, *shape), dtype)
    return Slots(
        history=row(jnp.int32, max_len),
        num_computed=row(jnp.int32),
        num_drafts=row(jnp.int32),
        write_start=row(jnp.int32),
        page_table=jnp.zeros((1, num_slots, max_pages), jnp.int32),
        temperature=row(jnp.float32),
        top_k=row(jnp.int32),
        top_p=row(jnp.float32),
        min_p=row(jnp.float32),
        seed=row(jnp.uint32, 2),
        num_logprobs=row(jnp.int32),
        processing=processing.allocate(num_slots, vocab),
        draft_logits=row(jnp.float32, draft_logits, vocab) if draft_logits else None,
        states=None if state is None else row(state.dtype, KEPT_STATES, *state.shape),
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
    num_prompt_tokens: int,
    tables: LogitsTables | None,
    max_len: int,
    max_pages: int,
) -> np.ndarray:
    """Everything `admit` needs, as one int32 buffer; floats by their bits. Of the tables only what they hold."""
    packed = np.zeros(packed_admission_size(max_len, max_pages), np.int32)
    packed[:3] = slot, num_computed, write_start
    floats = params.temperature, params.top_p, params.min_p
    packed[3:9].view(np.float32)[:] = (
        *floats,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    packed[9] = max(params.top_k, 0)
    packed[10] = -1 if params.logprobs is None else max(params.logprobs, 0)  # the whole vocabulary: `head.score_all`
    packed[11:13].view(np.uint32)[:] = seed_words(seed)
    packed[13] = num_prompt_tokens
    if tables is not None:
        packed[14:17] = num_prompt_tokens + params.min_tokens, tables.bias is not None, len(tables.bad_words)
    packed[_HEADER : _HEADER + len(token_ids)] = token_ids
    packed[_HEADER + max_len : _HEADER + max_len + len(pages)] = pages
    return packed


def admit(slots: Slots, packed: Int32[Array, " size"]) -> Slots:
    """The slots with one of them filled: a new request, a prefix hit, or one that comes back after preemption."""
    slot = packed[0]
    max_len = slots.history.shape[1]
    floats = jax.lax.bitcast_convert_type(packed[3:9], jnp.float32)
    rows = {
        "num_computed": packed[1],
        "write_start": packed[2],
        "temperature": floats[0],
        "top_p": floats[1],
        "min_p": floats[2],
        "top_k": packed[9],
        "num_logprobs": packed[10],
        "seed": jax.lax.bitcast_convert_type(packed[11:13], jnp.uint32),
        "history": packed[_HEADER : _HEADER + max_len],
    }
    asked = {
        "repetition": floats[3],
        "presence": floats[4],
        "frequency": floats[5],
        "prompt_length": packed[13],
        "min_length": packed[14],
        "has_bias": packed[15] != 0,
        "num_bad_words": packed[16],
    }
    fill = lambda tree, values: tree._replace(
        **{name: getattr(tree, name).at[slot].set(value) for name, value in values.items()}
    )
    page_table = slots.page_table.at[:, slot].set(packed[_HEADER + max_len :])
    return fill(slots, rows)._replace(page_table=page_table, processing=fill(slots.processing, asked))


def set_tables(slots: Slots, packed: Int32[Array, " size"]) -> Slots:
    """The slots with the tables of one of them (`LogitsTables.pack`)."""
    return slots._replace(processing=processing.set_tables(slots.processing, packed))


def states_before(
    slots: Slots,
    states: Float[Array, "tokens hidden"],
    token_slot: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
) -> Float[Array, "tokens hidden"]:
    """The state one position before each row: that of the row before it in the same run, or one kept by its slot."""
    follows = token_slot == jnp.roll(token_slot, 1)
    follows = follows.at[0].set(False)
    kept = slots.states.at[token_slot, (position - 1) % KEPT_STATES].get(mode="clip")
    return jnp.where(follows[:, None], jnp.roll(states, 1, axis=0), kept)


def keep_states(
    slots: Slots,
    states: Float[Array, "tokens hidden"],
    token_slot: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
) -> Slots:
    """The slots with the states of the last rows of each run."""
    behind = jnp.pad(token_slot, (0, KEPT_STATES), constant_values=-1)[KEPT_STATES:]
    where = jnp.where(behind == token_slot, slots.num_slots, token_slot)  # overwritten by a later row of its run
    return slots._replace(states=slots.states.at[where, position % KEPT_STATES].set(states, mode="drop"))
