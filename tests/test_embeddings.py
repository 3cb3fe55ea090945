"""Embeddings: against transformers' hidden states, pooled by torch; the same bits whatever happens around a request."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from checkpoint_tools import SHAPES as FOLDER_SHAPES
from checkpoint_tools import byte_backend
from engine_tools import TINY, run, tiny_decoder, tiny_engine
from golden_models import load_golden, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import LLM, AsyncEngine, Engine, PoolerConfig, PoolingParams, SamplingParams
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.hugging_face import load_hugging_face
from jaxserve.models.config import CheckpointError, ModelConfig, UnsupportedModelError
from jaxserve.models.weights import random_decoder
from jaxserve.pooling import PooledPrompt, Pooler
from jaxserve.runner import determinism

SHAPES = {"num_pages": 128, "max_num_seqs": 8, "max_num_batched_tokens": 16, "page_size": 8, "deterministic": False}
RAW = PoolingParams(normalize=False)


@pytest.fixture(scope="module", autouse=True)
def trusted():
    """Other tests test this machine for determinism."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(determinism, "row_invariance", lambda *_: None)
        yield


def unit(vector):
    return vector / np.sqrt(np.square(vector.astype(np.float64)).sum())


@pytest.mark.parametrize("kind", ["MEAN", "LAST"])
@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_embeddings_are_those_of_transformers(name, kind, tmp_path):
    """In steps of 16 tokens: the longest prompt takes five."""
    with np.load(Path(__file__).parent / "goldens" / "embeddings.npz") as golden:
        prompts = [part.tolist() for part in np.split(golden["prompts"], golden["starts"][1:-1])]
        expected = [golden[f"{name}/{kind}/{index}"] for index in range(len(prompts))]
    decoder = load_hugging_face(write_checkpoint(load_golden(name), tmp_path / name))
    pooler = PoolerConfig(pooling_type=kind)
    with LLM(engine=Engine(decoder=decoder, runner="pooling", pooler_config=pooler, **SHAPES)) as llm:
        for result, prompt, want in zip(llm.embed(prompts, RAW), prompts, expected, strict=True):
            assert result.embedding.dtype == np.float32
            assert (result.prompt_token_ids, result.error) == (prompt, None)
            np.testing.assert_allclose(result.embedding, want, atol=1e-4, rtol=0)
        for result, want in zip(llm.embed(prompts), expected, strict=True):
            np.testing.assert_allclose(result.embedding, unit(want), atol=1e-4, rtol=0)
        cut = [PoolingParams(dimensions=size) for size in (1, 2, 31, 32, 33, 64)]
        for result, params, want in zip(llm.embed(prompts, cut), cut, expected, strict=True):
            assert result.embedding.shape == (params.dimensions,)
            np.testing.assert_allclose(result.embedding, unit(want[: params.dimensions]), atol=1e-4, rtol=0)
        llm.engine.check_integrity()


# ---- the same bits ------------------------------------------------------------------------------------------

SOURCE = np.random.default_rng(3)
SHARED = SOURCE.integers(0, 300, 100).tolist()
PROMPTS = [
    SHARED[: SOURCE.integers(0, 100)] + SOURCE.integers(0, 300, size).tolist() for size in (1, 2, 15, 16, 17, 64, 90)
] + [SHARED[:64], SHARED[:65]]


def embedding_engine(kind, **options):
    return tiny_engine("bfloat16", runner="pooling", pooler_config={"pooling_type": kind}, **options)


def bits(results):
    return [result.embedding.tobytes() for result in results]


@pytest.fixture(scope="module", params=["MEAN", "LAST"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def alone(kind):
    with LLM(engine=embedding_engine(kind, enable_prefix_caching=False)) as llm:
        assert llm.engine.deterministic
        found = bits([llm.embed(prompt)[0] for prompt in PROMPTS])
    assert len(set(found)) == len(PROMPTS)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 64},
        pytest.param({"max_num_batched_tokens": 16, "async_scheduling": False}, marks=pytest.mark.slow),
        pytest.param({"max_num_seqs": 3}, marks=pytest.mark.slow),
    ],
)
def test_in_company_in_chunks_and_from_the_cache(kind, alone, options):
    with LLM(engine=embedding_engine(kind, **options)) as llm:
        for again in (False, True):
            results = llm.embed(PROMPTS)
            assert bits(results) == alone
            if again:  # a mean needs the hidden states of all positions: cached pages are read and not believed
                cached = [result.num_cached_tokens for result in results]
                assert all(cached[i] >= len(p) - 16 for i, p in enumerate(PROMPTS)) == (kind == "LAST")
                assert (sum(cached) == 0) == (kind == "MEAN")
        llm.engine.check_integrity()
        assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_pages


def test_preempted(kind, alone):
    """Urgent requests take the place of those that are half way; what these have pooled stays."""
    options = {"scheduling_policy": "priority", "num_pages": 14, "max_num_batched_tokens": 16}
    with embedding_engine(kind, **options) as engine:
        results = {}
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, PoolingParams(priority=-index))
            for _ in range(3):
                results |= {output.request_id: output for output in engine.step() if output.finished}
        while engine.has_unfinished():
            results |= {output.request_id: output for output in engine.step() if output.finished}
        assert engine.stats()["num_preemptions"] > 0
        assert bits([results[str(index)] for index in range(len(PROMPTS))]) == alone
        engine.check_integrity()


@pytest.mark.parametrize("running", ["recompute", "keep"])
def test_new_weights_pool_the_whole_prompt(kind, running):
    other = random_decoder(ModelConfig.from_hf(TINY), seed=2, dtype=tiny_decoder("bfloat16").embed[...].dtype)
    with LLM(engine=embedding_engine(kind, max_num_batched_tokens=16)) as llm:
        stream = llm.engine
        stream.add_request("x", PROMPTS[6], PoolingParams())
        for _ in range(4):
            assert not any(output.finished for output in stream.step())
        stream.update_params(other, running=running)
        outputs = []
        while stream.has_unfinished():
            outputs += stream.step()
        assert bits([outputs[-1]]) == bits(llm.embed(PROMPTS[6]))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.sampled_from(["MEAN", "LAST"]), st.data())
def test_a_mean_does_not_depend_on_the_cuts(cuts, kind, data):
    total = sum(cuts)
    values = np.random.default_rng(total).standard_normal((total, 5)).astype(np.float32) * 1e3
    whole = PooledPrompt(Pooler(kind, False, 5), PoolingParams(), total)
    whole.take(whole.next_position, values[whole.next_position :])
    one_by_one = PooledPrompt(Pooler(kind, False, 5), PoolingParams(), total)
    cut = PooledPrompt(Pooler(kind, False, 5), PoolingParams(), total)
    start = 0
    for position in range(total):
        one_by_one.take(position, values[position : position + 1])
    for count in cuts:
        first = max(start, cut.next_position)
        if first < start + count:
            assert first == cut.next_position
            cut.take(first, values[first : start + count])
            if data.draw(st.booleans()):
                cut.take(first, values[first : start + count])  # known already
        start += count
    assert whole.next_position is None
    assert cut.next_position is None
    expected = values.astype(np.float64).mean(0) if kind == "MEAN" else values[-1]
    np.testing.assert_allclose(whole.embedding(), expected, rtol=1e-6)
    assert whole.embedding().tobytes() == cut.embedding().tobytes() == one_by_one.embedding().tobytes()


# ---- who is for embeddings ----------------------------------------------------------------------------------


def write_embedding_folder(folder, *, modules=("Transformer", "Pooling", "Normalize"), bare=False, **pooling):
    """The golden model of Qwen3 as sentence-transformers keeps one; `bare`: without its head, and named so."""
    golden = load_golden("qwen3")
    if bare:
        own = {name.removeprefix("model."): value for name, value in golden.weights.items() if name != "lm_head.weight"}
        golden = golden._replace(config={**golden.config, "architectures": ["Qwen3Model"]}, weights=own)
    write_checkpoint(golden, folder)
    byte_backend(128).save(str(folder / "tokenizer.json"))
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "3_Dense"}
    listed = [
        {"idx": i, "name": str(i), "path": paths[kind], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    flags = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"word_embedding_dimension": 64} | flags))
    return folder


def test_a_folder_says_that_its_model_is_for_embeddings(tmp_path):
    prompts = [[5, 6, 7, 8, 9], list(range(3, 40))]
    decoder = load_hugging_face(write_checkpoint(load_golden("qwen3"), tmp_path / "plain"))
    expected = {}
    for kind in ("MEAN", "LAST"):
        pooler = {"pooling_type": kind, "normalize": False}
        with LLM(engine=Engine(decoder=decoder, runner="pooling", pooler_config=pooler, **FOLDER_SHAPES)) as llm:
            expected[kind] = [result.embedding for result in llm.embed(prompts)]
    converted = tmp_path / "converted"
    folders = [
        (write_embedding_folder(tmp_path / "mean", bare=True), "MEAN", True, {}),
        (
            write_embedding_folder(tmp_path / "last", modules=("Transformer", "Pooling"), pooling_mode="lasttoken"),
            *("LAST", False, {}),
        ),
        (tmp_path / "plain", "LAST", True, {"runner": "pooling"}),  # vLLM's way where nothing is said
        (tmp_path / "mean", "LAST", False, {"pooler_config": {"pooling_type": "LAST", "normalize": False}}),
        (converted, "MEAN", True, {}),
    ]
    convert(str(tmp_path / "mean"), converted)
    byte_backend(128).save(str(tmp_path / "plain" / "tokenizer.json"))
    for folder, kind, normalised, options in folders:
        with LLM(str(folder), **FOLDER_SHAPES, **options) as llm:
            for result, raw in zip(llm.embed(prompts), expected[kind], strict=True):
                np.testing.assert_allclose(result.embedding, unit(raw) if normalised else raw, atol=1e-6)
            with pytest.raises(ValueError, match=r"runner='pooling': .*runner must be 'generate'"):
                llm.generate([[1, 2]])
    with LLM(str(tmp_path / "mean"), runner="generate", **FOLDER_SHAPES) as llm:
        assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
        with pytest.raises(ValueError, match=r"runner='generate': .*modules.json.*runner must be 'pooling'"):
            llm.embed([[1, 2]])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"modules": ("Transformer", "Pooling", "Dense")}, UnsupportedModelError, "'Dense' is not supported"),
        ({"pooling_mode_cls_token": True}, UnsupportedModelError, "pooling_mode_cls_token"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, UnsupportedModelError, "not supported"),
        ({"pooling_mode": "max"}, UnsupportedModelError, "max"),
    ],
)
def test_a_way_that_there_is_not_is_refused(tmp_path, changes, error, message):
    folder = write_embedding_folder(tmp_path / "x", **changes)
    with pytest.raises(error, match=message):
        LLM(str(folder), **FOLDER_SHAPES)
    (folder / "modules.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"modules\.json: not a JSON list"):
        LLM(str(folder), **FOLDER_SHAPES)


def test_what_cannot_be_honoured_is_refused_by_name():
    for fields, field in (({"dimensions": 0}, "dimensions"), ({"normalize": 1}, "normalize"), ({"priority": "x"}, "p")):
        with pytest.raises(ValueError, match=f"^{field}"):
            PoolingParams(**fields)
    with LLM(engine=embedding_engine("MEAN")) as llm:
        for prompts, params, message in (
            ([[1, 2]], PoolingParams(dimensions=65), "dimensions=65: dimensions must be at most 64"),
            ([[1, 2]], SamplingParams(max_tokens=0), "runner='pooling': this engine makes embeddings only"),
            ([[]], None, "prompt: it holds no tokens"),
            ([[1] * 513], None, "prompt: 513 tokens: must be at most max_model_len=512"),
            ([[1, 2]], PoolingParams(priority=3), "priority=3"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.embed(prompts, params)
        assert llm.embed([[1] * 512])[0].error is None
        assert llm.stats()["generation_tokens"] == 0


def test_what_is_not_finite_is_an_error_of_its_own():
    decoder = tiny_decoder("float32")
    embed = decoder.embed[...]
    broken = random_decoder(decoder.config, seed=1, dtype=embed.dtype)
    broken.embed[...] = embed.at[5].set(np.nan)
    with LLM(engine=tiny_engine("float32", decoder=broken, runner="pooling")) as llm:
        wrong, right = llm.embed([[1, 5, 2], [1, 2]])
        assert wrong.embedding is None
        assert "not finite" in wrong.error
        assert np.isfinite(right.embedding).all()


def test_async():
    async def main():
        async with AsyncEngine(engine=embedding_engine("MEAN")) as engine:
            found = await asyncio.gather(*(engine.embed(prompt) for prompt in PROMPTS))
            with pytest.raises(ValueError, match="dimensions"):
                await engine.embed([1, 2], PoolingParams(dimensions=1000))
            await engine.check_integrity()
            return found

    with embedding_engine("MEAN") as engine:
        assert bits(asyncio.run(main())) == bits(run(engine, [(prompt, PoolingParams()) for prompt in PROMPTS]))
