"""What a request takes of several tokens that a step gives at once."""

import pytest

from jaxserve import SamplingParams
from jaxserve.request import Request

PROMPT, EOS, STOP = [1, 2, 3], 7, 12


def request(allowed: int, before: tuple[int, ...] = ()) -> Request:
    """A request that may have `allowed` output tokens, and has those `before`."""
    params = SamplingParams(max_tokens=allowed, stop_token_ids=[STOP])
    made = Request("r", 0, PROMPT, params, 0, 0, len(PROMPT) + allowed, frozenset({EOS, STOP}))
    assert made.take_tokens(before) == len(before)
    assert made.finish_reason is None
    return made


@pytest.mark.parametrize(
    ("allowed", "before", "tokens", "taken", "reason", "stop"),
    [
        (5, (), [10, 11, STOP, 20, 21, 22], 3, "stop", STOP),  # sglang #31599
        (5, (), [10, 11, EOS, 20, 21, 22], 3, "stop", None),  # the model's own end is no `stop_reason`
        (5, (), [10, 11, 20, 21, 22, STOP], 5, "length", None),  # a stop beyond the cap
        (5, (), [10, 11, 20, 21, STOP, 22], 5, "stop", STOP),  # the last that is allowed
        (5, (8, 9), [10, STOP, 20, 21], 2, "stop", STOP),  # as above, after tokens of earlier steps
        (5, (8, 9), [10, 11, 20, STOP], 3, "length", None),
        (5, (8, 9), [10, 11], 2, None, None),
        (5, (), [], 0, None, None),
    ],
)
def test_tokens_are_taken_up_to_a_stop_or_the_length(allowed, before, tokens, taken, reason, stop):
    found = request(allowed, before)
    assert found.take_tokens(tokens) == taken
    assert found.output_token_ids == [*before, *tokens[:taken]]
    assert (found.finish_reason, found.stop_reason) == (reason, stop)
