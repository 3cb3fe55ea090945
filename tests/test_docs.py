"""The examples of docs/LIBRARY.md, run as they are written, and what they claim."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from engine_tools import run

from jaxserve import Engine, SamplingParams
from jaxserve.runner import determinism

PAGE = Path(__file__).parent.parent / "docs" / "LIBRARY.md"


@pytest.fixture(scope="module")
def names():
    """What the blocks of the page leave behind, run one after the other under JAX's default promotion of dtypes."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    found: dict = {}
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(determinism, "row_invariance", lambda *_: None)
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), found)
    return found


def test_a_program_with_its_own_loop(names):
    assert [len(tokens) for tokens in names["answers"].values()] == [5, 5]


def test_outputs_have_their_forms(names):
    point = json.loads(names["texts"]["json"])
    assert len(point) == 2
    assert all(0 <= value <= 99 for value in point)
    assert re.fullmatch("a[bc]{3}", names["texts"]["regex"])
    assert names["texts"]["choice"] in ("bad", "fig")


def test_embeddings_have_length_1(names):
    assert [vector.shape for vector in names["vectors"]] == [(8,), (8,)]
    np.testing.assert_allclose(np.linalg.norm(names["vectors"], axis=1), 1, rtol=1e-6)
    assert not np.array_equal(*names["vectors"])


def test_evaluation_follows_the_training(names):
    """The model learns the text by heart, the engine says it, and nothing was compiled for the updates."""
    assert names["correct"][-1] == 9
    assert names["correct"] == sorted(names["correct"])
    assert names["compilations"] <= 4  # admit, a body or two, a head


def test_the_policy_learns_and_both_sides_agree(names):
    assert names["rewards"][-1] > names["rewards"][0] + 0.3
    assert max(report.max_abs_difference for report in names["reports"]) < 1e-3
    assert {report.clipped_share for report in names["reports"]} == {0}


def test_many_callers_get_what_an_engine_gives(names):
    params = SamplingParams(temperature=0, max_tokens=5)
    with Engine.from_flax(names["model"], **names["shapes"]) as engine:
        requests = [([index, 3], params) for index in range(10)]
        assert names["many"] == [result.outputs[0].token_ids for result in run(engine, requests)]
        engine.update_params(names["policy"])
        assert names["later"] == run(engine, [([0, 3], params)])[0].outputs[0].token_ids
    assert np.unique(names["many"], axis=0).shape[0] > 1
