"""The engine against Hugging Face transformers: its greedy continuations and log-probabilities in float32."""

import json
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_tools import run
from flax import nnx
from golden_models import GOLDEN_NAMES, load_golden, write_checkpoint

from jaxserve import LLM, Engine, SamplingParams
from jaxserve.checkpoint.demo_model import demo_model_folder
from jaxserve.checkpoint.hugging_face import load_hugging_face
from jaxserve.text.tokenizer import Tokenizer

SMOLLM2 = Path(__file__).parent / "goldens" / "smollm2.npz"
SCORES = Path(__file__).parent / "goldens" / "smollm2_scores.npz"


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_tiny_families(name, tmp_path):
    golden = load_golden(name)
    folder = write_checkpoint(golden, tmp_path / name)
    decoder = load_hugging_face(folder, max_model_len=golden.max_model_len)
    certain = golden.certain_length() if len(golden.continuation) else 0
    params = SamplingParams(temperature=0, max_tokens=max(certain, 1), ignore_eos=True, logprobs=5, prompt_logprobs=0)
    options = {
        "max_model_len": golden.max_model_len or 128,
        "num_pages": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
    }
    options["deterministic"] = False  # float32 would be padded to 64 rows
    with Engine(decoder=decoder, **options) as engine:
        if len(golden.prompt) >= engine.max_model_len:
            golden = golden._replace(prompt=golden.prompt[: engine.max_model_len - 1])
            certain = 0
        (result,) = run(engine, [(golden.prompt.tolist(), params)])
    output = result.outputs[0]
    assert output.token_ids[:certain] == golden.continuation[:certain].tolist()
    expected = jax.nn.log_softmax(golden.logits[len(golden.prompt) - 1].astype(np.float32))
    for token, logprob in output.logprobs[0].items():
        assert logprob.logprob == pytest.approx(float(expected[token]), abs=1e-4)
    top = np.argsort(-np.asarray(expected), kind="stable")[:5].tolist()
    assert set(top) <= set(output.logprobs[0])
    rows = np.asarray(jax.nn.log_softmax(golden.logits.astype(np.float32)))
    for place, token in enumerate(golden.prompt.tolist()[1:], 1):
        assert result.prompt_logprobs[place][token].logprob == pytest.approx(float(rows[place - 1, token]), abs=1e-4)


class SmolLM2Goldens(NamedTuple):
    prompts: list[list[int]]
    arrays: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def smollm2() -> SmolLM2Goldens:
    with np.load(SMOLLM2) as file:
        arrays = {name: file[name] for name in file}
    starts = arrays["prompt_ids_starts"]
    return SmolLM2Goldens([arrays["prompt_ids"][a:b].tolist() for a, b in pairwise(starts)], arrays)


@pytest.fixture(scope="module")
def smollm2_decoder():
    return load_hugging_face(demo_model_folder(), dtype=jnp.float32)


def test_smollm2_logits(smollm2, smollm2_decoder):
    """Every recorded logit within 2e-3 of the largest; the model alone, over whole prompts."""
    graph, state = nnx.split(smollm2_decoder)
    length = max(map(len, smollm2.prompts))

    @jax.jit
    def logits(state, tokens, rows):
        model = nnx.merge(graph, state)
        hidden = model(tokens, jnp.arange(length, dtype=jnp.int32))
        return model.logits(hidden[rows])

    for index, prompt in enumerate(smollm2.prompts):
        tokens = np.pad(np.array(prompt, np.int32), (0, length - len(prompt)))
        found = np.asarray(logits(state, tokens, smollm2.arrays["positions"][index]))
        tolerance = 2e-3 * np.abs(smollm2.arrays["top_logits"][index]).max()
        for row in range(3):
            top_ids, top = smollm2.arrays["top_ids"][index, row], smollm2.arrays["top_logits"][index, row]
            np.testing.assert_allclose(found[row, top_ids], top, atol=tolerance, rtol=0)
            others = found[row, smollm2.arrays["random_ids"]]
            np.testing.assert_allclose(others, smollm2.arrays["random_logits"][index, row], atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def smollm2_engine(smollm2_decoder):
    """In float32; prompts in chunks."""
    options = {"num_pages": 512, "max_model_len": 2048, "max_num_seqs": 8, "deterministic": False}
    with Engine(decoder=smollm2_decoder, text=Tokenizer.from_folder(demo_model_folder()), **options) as engine:
        yield engine


def test_smollm2_scores(smollm2_engine):
    """Log-likelihoods within 1e-3 of transformers', cold and from the prefix cache."""
    with np.load(SCORES) as golden:
        pairs, ids = json.loads(bytes(golden["pairs"])), np.split(golden["ids"], golden["ids_starts"][1:-1])
        starts, greedy, logprobs = golden["starts"], golden["greedy"], golden["token_logprobs"]
    llm = LLM(engine=smollm2_engine)
    for cached in (False, True):
        scores = llm.score([prompt for prompt, _ in pairs], [continuation for _, continuation in pairs])
        assert (sum(score.num_cached_tokens for score in scores) > 800) == cached
        first = 0
        for score, tokens, start, best in zip(scores, ids, starts, greedy, strict=True):
            assert score.token_ids == tokens[start:].tolist()
            expected = logprobs[first : first + len(score.token_ids)]
            np.testing.assert_allclose(score.token_logprobs, expected, atol=1e-3, rtol=0)
            assert score.logprob == pytest.approx(float(expected.astype(np.float64).sum()), abs=1e-3)
            assert score.is_greedy == best
            first += len(score.token_ids)
    smollm2_engine.check_integrity()


def test_smollm2_continuations_through_the_engine(smollm2, smollm2_engine):
    """All prompts together, in chunks; greedy, up to the first margin under 1e-3."""
    certain = [int(np.argmax(margins < 1e-3)) or 64 for margins in smollm2.arrays["margins"]]
    requests = [
        (prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=20))
        for prompt, count in zip(smollm2.prompts, certain, strict=True)
    ]
    results = run(smollm2_engine, requests)
    for index, (result, count) in enumerate(zip(results, certain, strict=True)):
        assert result.outputs[0].token_ids == smollm2.arrays["continuations"][index, :count].tolist()
        top_ids, top = smollm2.arrays["top_ids"][index, 2], smollm2.arrays["top_logits"][index, 2]
        expected = dict(zip(top_ids.tolist(), (top - smollm2.arrays["logsumexp"][index, 2]).tolist(), strict=True))
        for token, logprob in result.outputs[0].logprobs[0].items():
            assert logprob.logprob == pytest.approx(expected[token], abs=2e-3 * float(np.abs(top).max()))
