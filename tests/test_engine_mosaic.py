"""The engine over the Hopper kernels, interpreted on the CPU: `xla`'s results, and the same bits in any company."""

import pytest
from engine_tools import assert_same, run, run_alone, tiny_decoder, tiny_engine

from jaxserve import SamplingParams, startup
from jaxserve.kernels_pallas import hopper
from jaxserve.kernels_pallas.paged_attention import mosaic_backend
from jaxserve.kernels_pallas.paged_attention.mosaic import mosaic_attention
from jaxserve.kernels_pallas.paged_attention.mosaic.config import TileConfig

MODEL = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
# One block a split, so that short prompts have several; steps of 8 tokens go to the decode kernel alone.
TILES = TileConfig(
    split_blocks=1,
    decode_stages=2,
    decode_programs=1,
    prefill_stages=2,
    prefill_programs=1,
    small_bucket=8,
    interpret=hopper.interpreted(detect_races=False),
)
OPTIONS = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "num_pages": 64, "max_model_len": 160}


def mosaic_engine(monkeypatch, **options):
    def choose(backend, *, group, max_model_len, **_):
        return mosaic_backend(mosaic_attention(head_dim=64, group=group, max_model_len=max_model_len, config=TILES))

    with monkeypatch.context() as patched:
        patched.setattr(startup, "choose_attention", choose)
        # What calls back into Python cannot be kept in a cache of executables.
        return tiny_engine(decoder=tiny_decoder(**MODEL), compilation_cache_dir="", **{**OPTIONS, **options})


def requests(*lengths: int, max_tokens: int) -> list:
    prompt = [(7 * index + index // 3) % 299 + 1 for index in range(200)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=2, ignore_eos=True)
    return [(prompt[length : 2 * length], params) for length in lengths]


def check_against_xla(monkeypatch, asked: list, **options) -> None:
    with mosaic_engine(monkeypatch, deterministic=False, **options) as engine:
        results = run(engine, asked)
    options = {**OPTIONS, **options, "deterministic": False, "attention_backend": "xla"}
    with tiny_engine(decoder=tiny_decoder(**MODEL), **options) as engine:
        expected = run(engine, asked)
    for result, want in zip(results, expected, strict=True):
        (branch,), (other,) = result.outputs, want.outputs
        assert branch.token_ids == other.token_ids
        for mine, theirs in zip(branch.logprobs, other.logprobs, strict=True):
            assert {token: pytest.approx(entry.logprob, abs=0.02) for token, entry in theirs.items()} == {
                token: entry.logprob for token, entry in mine.items()
            }


def test_pages_hold_64_tokens_unless_asked_otherwise(monkeypatch):
    for options, page_size in (({}, 64), ({"page_size": 16}, 16)):
        with mosaic_engine(monkeypatch, deterministic=False, **options) as engine:
            assert engine.runner.step.attention.name == "mosaic"
            assert engine.scheduler.page_size == engine.runner.kv[0].pages.shape[3] == page_size


@pytest.mark.slow
def test_the_first_token_is_that_of_xla(monkeypatch):
    """One step: a prompt in tiles, the rest of it and another prompt as items, one of them split."""
    check_against_xla(monkeypatch, requests(70, 2, max_tokens=1), max_num_batched_tokens=72)


@pytest.mark.slow
def test_greedy_results_are_those_of_xla(monkeypatch):
    """A prompt of several chunks and splits, decode rows beside chunks, and decode rows alone."""
    check_against_xla(monkeypatch, requests(70, 5, 33, max_tokens=6))


@pytest.mark.slow
def test_bits_do_not_depend_on_company_or_chunks(monkeypatch):
    asked = requests(70, 5, 33, 1, max_tokens=6)
    with mosaic_engine(monkeypatch, enable_prefix_caching=False, max_num_batched_tokens=80) as engine:
        assert engine.deterministic is True
        alone = run_alone(engine, asked)
    with mosaic_engine(monkeypatch, page_size=16, max_num_batched_tokens=16) as engine:
        assert_same(run(engine, asked), alone)
        assert_same(run(engine, asked), alone)  # from the prefix cache


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation_gives_the_same_bits(monkeypatch, method):
    """Prompts that repeat themselves and one that does not, so that some drafts do not exist and some are rejected."""
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)
    asked = [([30, 40, 50] * 8, params), ([9, 8, 7, 6, 5], params), ([60, 61] * 33, params)]
    config = {"method": method, "num_speculative_tokens": 3, "length_control": "fixed"}
    draft = tiny_decoder(**{**MODEL, "rope_theta": 500.0}) if method == "draft_model" else None
    with mosaic_engine(monkeypatch) as engine:
        expected = run(engine, asked)
    with mosaic_engine(monkeypatch, speculative_config=config, draft_decoder=draft) as engine:
        assert_same(run(engine, asked), expected)
        stats = engine.stats()
        assert 0 < stats["spec_num_accepted_tokens"] < stats["spec_num_draft_tokens"]
