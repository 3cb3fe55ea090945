"""What the host is told of the rows of a head."""

import jax.numpy as jnp
import numpy as np

from jaxserve.runner.head import reported
from jaxserve.speculative.acceptance import NO_DRAFT, NO_TOKEN, REJECTED


def test_every_row_is_a_token_or_says_why_there_is_none():
    columns = [  # token, alive, real, counts -> reported
        (7, True, True, True, 7),
        (7, False, True, True, NO_TOKEN),
        (7, True, True, False, REJECTED),
        (7, False, True, False, REJECTED),
        (7, True, False, False, NO_DRAFT),
        (7, False, False, False, NO_DRAFT),
    ]
    token, alive, real, counts, expected = map(jnp.array, zip(*columns, strict=True))
    np.testing.assert_array_equal(reported(token, alive, real, counts), expected)
