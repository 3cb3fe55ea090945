"""Whatever proposes, the output is what it is without: over all parameters of requests, with preemption, in company."""

import draft_head_tools as tools
import pytest
from engine_tools import assert_same, repetitive_requests, requests_for, run, tiny_decoder, tiny_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve import SamplingParams

# One pool of few pages and few buckets: what is compiled for one test serves all.
SIZES = {"max_num_batched_tokens": 8, "max_num_seqs": 4}
METHODS = ["draft_model", "medusa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eagle", "eagle3"))]
COMPANY = st.lists(repetitive_requests(), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def plain():
    with tiny_engine(**SIZES) as engine:
        yield engine


@pytest.fixture(scope="module", params=METHODS)
def speculating(request, tmp_path_factory):
    method, draft = request.param, {}
    config = {"method": method, "num_speculative_tokens": 3, "length_control": "fixed"}
    if method == "draft_model":
        config["prompt_lookup"] = False
        smaller = {"num_hidden_layers": 1, "num_key_value_heads": 1, "num_attention_heads": 4}
        draft["draft_decoder"] = tiny_decoder(**smaller)
    else:
        folder = tmp_path_factory.mktemp(method)
        config["model"] = str(tools.write_head(folder, method, tools.head_tensors(method, reduced=True)))
    with tiny_engine(**SIZES, num_pages=10, speculative_config=config, **draft) as engine:
        yield engine


def test_the_same_as_without(plain, speculating):
    growing = [  # together more pages than there are
        ([20 + index], SamplingParams(temperature=index % 2, seed=index, max_tokens=60, ignore_eos=True, logprobs=0))
        for index in range(SIZES["max_num_seqs"])
    ]
    requests = [*growing, *requests_for(300, 10, longest=100, max_tokens=24)]
    expected = run(plain, requests)
    assert_same(run(speculating, requests), expected)
    assert_same(run(speculating, requests[::4]), expected[::4])  # cached
    stats = speculating.stats()
    assert stats["spec_num_draft_tokens"] > stats["spec_num_accepted_tokens"] > 0
    assert stats["num_preemptions"] > 0


@settings(max_examples=5, deadline=None)
@given(COMPANY)
def test_any_parameters(plain, speculating, requests):
    assert_same(run(speculating, requests), run(plain, requests))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(COMPANY)
def test_many_parameters(plain, speculating, requests):
    assert_same(run(speculating, requests), run(plain, requests))
