"""Which tokens each row of a step may yield, as bits."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import llguidance
import numpy as np

from jaxserve.sampling.processing import mask_words
from jaxserve.structured.compiler import Constraint


class ConstrainedRow(NamedTuple):
    """A row whose output is constrained, and the draft tokens of the rows behind it (those that exist)."""

    row: int
    constraint: Constraint
    drafts: list[int]


class MaskBuilder:
    """Computes the masks of a step, in parallel and without Python's lock."""

    def __init__(self, vocab: int):
        self._vocab = vocab

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        return llguidance.LLExecutor()

    def build(self, rows: Sequence[ConstrainedRow], num_rows: int) -> np.ndarray:
        """uint32 [num_rows, mask_words(vocab)]: a token's bit is set where the row may yield it, and all bits of rows
        without a constraint. Rows behind a draft that cannot be accepted are as they come."""
        masks = np.full((num_rows, mask_words(self._vocab)), 0xFFFFFFFF, np.uint32)
        if not rows:
            return masks
        where = masks.ctypes.data, masks.shape[1] * masks.itemsize, num_rows
        if single := [(row.constraint.matcher, row.row) for row in rows if not row.drafts]:
            self._executor.unsafe_compute_mask_ptr(single, *where)
        if several := [(row.constraint.matcher, row.row, row.drafts) for row in rows if row.drafts]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(several, *where)
        ends: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            places = ends.setdefault(row.constraint.end_ids, [])
            places.extend(range(row.row, row.row + 1 + len(row.drafts)))
        for end_ids, places in ends.items():
            self._allow_ends(masks, places, end_ids)
        return masks

    def _allow_ends(self, masks: np.ndarray, rows: list[int], end_ids: tuple[int, ...]) -> None:
        """The model's own tokens for the end are allowed where the end is."""
        may_end = (masks[rows, self._vocab // 32] >> np.uint32(self._vocab % 32)) & np.uint32(1)
        for token in end_ids:
            bit = np.uint32(1) << np.uint32(token % 32)
            words = masks[rows, token // 32]
            masks[rows, token // 32] = np.where(may_end == 1, words | bit, words & ~bit)
