"""Which rows of a step count, against a loop over the runs."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.speculative.acceptance import NO_DRAFT, NO_TOKEN, REJECTED
from jaxserve.speculative.verification import DraftRows, reached, reported

ROWS = 24
run = st.tuples(
    st.lists(st.integers(0, 1), min_size=0, max_size=7),  # draft tokens
    st.integers(0, 7),  # how many of them exist
    st.lists(st.integers(0, 1), min_size=8, max_size=8),  # what the target samples
    st.lists(st.booleans(), min_size=8, max_size=8),  # whether it can sample at all (mostly yes)
)


@settings(max_examples=300, deadline=None)
@given(st.lists(run, min_size=1, max_size=6), st.booleans())
def test_the_rows_that_count_are_those_behind_right_drafts(runs, all_alive):
    number, draft, real, sampled, alive, expected = ([] for _ in range(6))
    for drafts, exist, targets, can in runs:
        exist = min(exist, len(drafts))
        if len(number) + len(drafts) + 1 > ROWS:
            break
        going_on = True
        for row in range(len(drafts) + 1):
            lives = all_alive or can[row]
            if row > 0:
                going_on = going_on and row <= exist and lives and drafts[row - 1] == targets[row - 1]
            number.append(row)
            draft.append(drafts[row - 1] if row else 9)
            real.append(row <= exist)
            sampled.append(targets[row])
            alive.append(lives)
            missing = REJECTED if row <= exist else NO_DRAFT
            expected.append((targets[row] if lives else NO_TOKEN) if going_on else missing)
    fill = lambda values, value, dtype: np.array([*values, *[value] * (ROWS - len(values))], dtype)
    rows = DraftRows(*map(jnp.asarray, (fill(number, 0, np.int32), fill(draft, 0, np.int32), fill(real, False, bool))))
    tokens, lives = jnp.asarray(fill(sampled, 0, np.int32)), jnp.asarray(fill(alive, True, bool))
    counts = reached(rows, tokens, lives)
    assert reported(tokens, lives, rows.real, counts)[: len(number)].tolist() == expected
    assert not counts[len(number) :].any(), "padding counts"
