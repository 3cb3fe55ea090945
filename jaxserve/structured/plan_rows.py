"""Which rows of a plan have a form to keep."""

import numpy as np

from jaxserve.request import Request, RequestState
from jaxserve.scheduler.plan import StepPlan
from jaxserve.structured.masks import ConstrainedRow


def constrained_rows(plan: StepPlan, drafts: np.ndarray | None) -> list[tuple[Request, ConstrainedRow]]:
    """The constrained rows of a plan whose requests still run; `drafts` [slots, ...] are the draft tokens, -1 none."""
    rows, row = [], 0
    for request, slot, _, _, sample, num_drafts, _ in plan.entries:
        if sample and request.constraint is not None and request.state is not RequestState.FINISHED:
            tokens = drafts[slot, :num_drafts].tolist() if num_drafts else []
            existing = tokens[: tokens.index(-1)] if -1 in tokens else tokens
            rows.append((request, ConstrainedRow(row, request.constraint, existing)))
        row += sample + num_drafts
    return rows
