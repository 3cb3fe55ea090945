"""Beam search against transformers' own on tiny models, and its steps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from golden_models import load_golden, write_checkpoint

from jaxserve import LLM, BeamSearchParams, Engine
from jaxserve.checkpoint.hugging_face import load_hugging_face

CASES = json.loads((Path(__file__).parent / "goldens" / "beams.json").read_text())
SHAPES = {"num_pages": 128, "max_num_seqs": 8, "max_num_batched_tokens": 16, "page_size": 8, "deterministic": False}


@pytest.fixture(scope="module", params=["llama3", "qwen3"])
def llm(request, tmp_path_factory):
    folder = write_checkpoint(load_golden(request.param), tmp_path_factory.mktemp("beams") / request.param)
    with LLM(engine=Engine(decoder=load_hugging_face(folder), **SHAPES)) as llm:
        llm.name = request.param
        yield llm
        llm.engine.check_integrity()


def ends(llm, token_ids):
    """Make these the model's ends of sequence."""
    llm.engine.model_config = replace(llm.engine.model_config, eos_token_ids=tuple(token_ids))


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_transformers_beams_are_found(llm, every):
    cases = [case for case in CASES if case["model"] == llm.name][::every]
    assert len(cases) * every > 50
    ended = 0
    for case in cases:
        fields = {key: case[key] for key in ("beam_width", "length_penalty", "max_tokens", "early_stopping")}
        ends(llm, case["eos_token_id"] or [])
        [result] = llm.beam_search([case["prompt"]], BeamSearchParams(**fields))
        assert result.prompt_token_ids == case["prompt"]
        assert [sequence.token_ids for sequence in result.sequences] == [tokens for tokens, _ in case["sequences"]], (
            case
        )
        for sequence, (_, score) in zip(result.sequences, case["sequences"], strict=True):
            assert sequence.score == pytest.approx(score, abs=1e-3)
            ended += sequence.finish_reason == "stop"
            stopped = sequence.token_ids[-1] in (case["eos_token_id"] or ())
            assert sequence.finish_reason == ("stop" if stopped else "length")
    assert ended > 0
    assert every > 1 or ended > 10
    assert llm.stats()["prefix_cache_hits"] > 0
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_pages


def test_prompts_together_are_as_alone(llm):
    ends(llm, [2, 41, 42, 43])
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=0.5)
    prompts = [case["prompt"] for case in CASES[:40:8]]
    together = [[sequence.token_ids for sequence in result.sequences] for result in llm.beam_search(prompts, params)]
    alone = [[sequence.token_ids for sequence in llm.beam_search(prompt, params)[0].sequences] for prompt in prompts]
    assert together == alone
    ignoring = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
    assert all(len(sequence.token_ids) == 5 for sequence in llm.beam_search(prompts[0], ignoring)[0].sequences)


def test_what_cannot_be_searched_is_refused(llm):
    for fields, field in (
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "length_penalty": "1"}, "length_penalty"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping"),
    ):
        with pytest.raises(ValueError, match=field):
            BeamSearchParams(**fields)
    with pytest.raises(ValueError, match="params"):
        llm.beam_search([1, 2], 3)
    with pytest.raises(ValueError, match="prompt"):
        llm.beam_search([[1, 2], [3] * 500], BeamSearchParams(beam_width=2))
