"""Beam search against transformers' own on tiny models, and its steps."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_tools import tiny_decoder, tiny_engine
from flax import nnx
from golden_models import load_golden, write_checkpoint

from jaxserve import LLM, BeamSearchParams, Engine, SamplingParams
from jaxserve.beam_search import BeamSearch, Following, likeliest
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
    processor = llm.engine.input_processor
    processor.model_config = replace(processor.model_config, eos_token_ids=tuple(token_ids))


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
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "priority": "high"}, "priority"),
    ):
        with pytest.raises(ValueError, match=field):
            BeamSearchParams(**fields)
    with pytest.raises(ValueError, match="params"):
        llm.beam_search([1, 2], 3)
    with pytest.raises(ValueError, match="prompt"):
        llm.beam_search([[1, 2], [3] * 500], BeamSearchParams(beam_width=2))


# ---- pages --------------------------------------------------------------------------------------------------

PARAMS = BeamSearchParams(beam_width=4, max_tokens=14, ignore_eos=True)
FEW = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "deterministic": False}
PROMPT = list(range(3, 40))  # four pages of 8 and five tokens of the fifth


def beams_by_definition(decoder, prompt, params):
    """What the search finds when the model computes every beam from its beginning, without pages or an engine."""
    model = nnx.jit(lambda model, tokens: model.logits(model(tokens, jnp.arange(64, dtype=jnp.int32))))
    search = BeamSearch(params, frozenset(), params.max_tokens)
    while not search.done:
        following = []
        for beam in search.running:
            ids = [*prompt, *beam.token_ids]
            padded = jnp.array(ids + [0] * (64 - len(ids)), jnp.int32)
            row = np.asarray(jax.nn.log_softmax(model(decoder, padded)[len(ids) - 1].astype(jnp.float32)))
            order = np.argsort(-row, kind="stable")
            following.append(Following(order, row[order]))
        search.advance(following)
    return search.results


@pytest.fixture(scope="module")
def tiny():
    """Without a prefix cache: beams have nothing but each other's pages."""
    with LLM(engine=tiny_engine("float32", enable_prefix_caching=False, page_size=8, **FEW)) as llm:
        yield llm


def test_beams_share_pages_and_copy_what_they_write_to(tiny, monkeypatch):
    """Every position is computed once for each beam: nothing of a common past again."""
    engine, pool = tiny.engine, tiny.engine.scheduler.pool
    engine.reset_stats()
    engine.add_request("beams", PROMPT, PARAMS)
    copied, outputs, shared, most, run_copies = [], [], 0, 0, engine.runner.copy_pages
    monkeypatch.setattr(engine.runner, "copy_pages", lambda pairs: (copied.extend(pairs), run_copies(pairs)))
    while engine.has_unfinished():
        outputs += engine.step()
        engine.check_integrity()
        owners = [request.pages for request in (*engine.scheduler.running, *engine.scheduler.held.beams)]
        shared = max(shared, max((pool.references(page) for pages in owners for page in pages), default=0))
        most = max(most, pool.num_pages - pool.num_free)
    [output] = outputs
    assert shared >= PARAMS.beam_width
    # At most one copy less than there are beams: who is the last to write to a page has it alone.
    assert 0 < len(copied) <= (PARAMS.beam_width - 1) * PARAMS.max_tokens
    # The prompt once and one token of each beam behind it: the first beam is the prompt's.
    assert engine.stats()["computed_tokens"] == len(PROMPT) + (PARAMS.max_tokens - 1) * PARAMS.beam_width
    # The prompt's full pages once; of each beam, and of what it went on from, those behind them.
    behind = -(-(len(PROMPT) + PARAMS.max_tokens) // 8) - len(PROMPT) // 8
    assert most <= len(PROMPT) // 8 + 2 * PARAMS.beam_width * behind
    assert pool.num_free == pool.num_pages
    expected = beams_by_definition(tiny_decoder("float32"), PROMPT, PARAMS)
    assert [found.token_ids for found in output.outputs] == [want.token_ids for want in expected]
    for found, want in zip(output.outputs, expected, strict=True):
        assert found.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_seqs": 3, "max_num_batched_tokens": 16}, marks=pytest.mark.slow),  # too few slots
        {"num_pages": 13, "enable_prefix_caching": False},  # held pages are given up, beams are computed again
        pytest.param({"num_pages": 13, "async_scheduling": False}, marks=pytest.mark.slow),
        pytest.param({"scheduling_policy": "static"}, marks=pytest.mark.slow),
    ],
)
def test_beams_find_the_same_where_room_is_short_and_in_company(tiny, options):
    expected = tiny.beam_search([PROMPT, PROMPT[:8], [5]], PARAMS)
    with LLM(engine=tiny_engine("float32", page_size=8, **(FEW | options))) as llm:
        for prompt, want in zip([PROMPT, PROMPT[:8], [5]], expected, strict=True):
            assert llm.beam_search(prompt, PARAMS)[0].sequences == want.sequences
        other = llm.stream(PROMPT[:3], SamplingParams(max_tokens=30, ignore_eos=True))
        next(other)
        found = llm.beam_search([PROMPT, PROMPT[:8], [5]], PARAMS)
        assert [result.sequences for result in found] == [want.sequences for want in expected]
        assert sum(len(delta.outputs[0].token_ids) for delta in other) > 0
        llm.engine.check_integrity()
        assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_pages
        assert not llm.engine.scheduler.held.beams


def test_a_search_that_is_given_up_leaves_nothing(tiny):
    engine = tiny.engine
    for steps in range(1, 9):
        engine.add_request("beams", PROMPT, PARAMS)
        for _ in range(steps):
            engine.step()
        engine.abort("beams")
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
        assert outputs[-1].finished
        assert {output.finish_reason for output in outputs[-1].outputs} == {"abort"}
        engine.step()  # what was in flight
        engine.check_integrity()
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages


def test_wide_searches_rank_the_whole_vocabulary(tiny):
    params = BeamSearchParams(beam_width=30, max_tokens=5, ignore_eos=True, n=3)
    [result] = tiny.beam_search(PROMPT, params)
    expected = beams_by_definition(tiny_decoder("float32"), PROMPT, params)
    assert [found.token_ids for found in result.sequences] == [want.token_ids for want in expected]
    assert len(result.sequences) == 3


def test_the_likeliest_of_equal_ones_are_the_lowest():
    values = np.array([1, 3, 2, 3, 2, 2, 0], np.float32)
    for count in range(1, 9):
        found = likeliest(values, count)
        assert found.token_ids.tolist() == np.argsort(-values, kind="stable")[:count].tolist()
        assert found.logprobs.tolist() == values[found.token_ids].tolist()
