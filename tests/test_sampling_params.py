"""SamplingParams: every rule, and seeds that never change."""

import math

import pytest

from jaxserve.sampling_params import SamplingParams, child_seed, seed_words
from jaxserve.validation import nearest_name


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.seed, params.max_tokens, params.stop_token_ids) == (None, 16, ())
    assert (params.ignore_eos, params.logprobs, params.n) == (False, None, 1)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, 3.5e38, True, "1", None]),
        ("top_k", [-2, 1.5, True, 2**31, None]),
        ("top_p", [0, 0.0, 1.01, -1, math.nan, True]),
        ("min_p", [-0.01, 1.01, math.nan, False]),
        ("seed", [1.0, True, 2**63, -(2**63) - 1, "7"]),
        ("max_tokens", [-1, 1.0, True]),
        ("stop_token_ids", [3, [1.0], [-1], [True], "12", None]),
        ("ignore_eos", [1, None]),
        ("logprobs", [-2, 21, 1.0, True]),
        ("prompt_logprobs", [-2, 21, 1.0, True]),
        ("prompt_logprobs_start", [-1, 1.0, None]),
        ("min_tokens", [-1, 17, 1.0, None]),
        ("repetition_penalty", [0, -1, math.inf, True, None]),
        ("presence_penalty", [-2.1, 2.1, math.nan, None]),
        ("frequency_penalty", [-2.1, 2.1, "1", None]),
        (
            "logit_bias",
            [{"a": 1}, {-1: 1}, {1.5: 1}, {1: 101}, {1: math.nan}, {1: None}, {True: 1}, {1: 1, "1": 2}, [1], 5],
        ),
        ("allowed_token_ids", [[], (), [-1], ["a"], [True], 5]),
        ("bad_words", ["word", [""], ["  "], [3], 5, ["\ud800"]]),
        ("stop", ["", [""], ["a", ""], [3], 5, "\ud800"]),
        ("include_stop_str_in_output", [1, None]),
        ("skip_special_tokens", [1, None]),
        ("priority", [1.5, True, None, 2**63]),
        ("cache_salt", [3, b"x", "\ud800"]),
        ("n", [0, 129, 1.0, True]),
    ],
)
def test_wrong_values_are_refused_with_field_value_and_rule(field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{field}=.*: {field} must be ") as error:
            SamplingParams(**{field: value})
        assert repr(value) in str(error.value)


def test_limits_are_accepted():
    SamplingParams(temperature=0, top_k=-1, top_p=1, min_p=1, seed=-(2**63), max_tokens=None, logprobs=0, n=128)
    SamplingParams(temperature=3.4e38, top_k=2**31 - 1, top_p=1e-9, seed=2**63 - 1, logprobs=20)
    SamplingParams(max_tokens=0, logprobs=-1, prompt_logprobs=-1, min_tokens=0)
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("temprature", "temperature"),
        ("topP", "top_p"),
        ("top-k", "top_k"),
        ("max_token", "max_tokens"),
        ("Seed", "seed"),
    ],
)
def test_wrong_names_are_refused_with_the_nearest(wrong, right):
    with pytest.raises(TypeError, match=f"no field '{wrong}': did you mean '{right}'"):
        SamplingParams.from_dict({wrong: 1})


def test_a_name_like_no_other_lists_them_all():
    assert nearest_name("qqqq", ["seed", "n"]) is None
    with pytest.raises(TypeError, match=r"it has temperature, top_k, .*"):
        SamplingParams.from_dict({"zzzzzzzz": 1})


def test_child_seeds_are_fixed_and_distinct():
    assert child_seed(7, 0) == 7
    assert child_seed(7, 1) == 8875243823434874480
    seeds = [child_seed(seed, i) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for i in range(100)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_seed_words_hold_all_64_bits():
    assert seed_words(1) == (1, 0)
    assert seed_words(-1) == (2**32 - 1, 2**32 - 1)
    assert seed_words(-(2**63)) == (0, 2**31)
