"""EngineConfig: every rule, before an engine or a device is there."""

import dataclasses
import math
import operator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.config import EngineConfig, PoolerConfig, SpeculativeConfig, cache_folder

WRONG = {
    "linear_backend": ["reference", "cuda", None],
    "model": ["", 3, ["a"]],
    "tokenizer": ["", 3, True],
    "dtype": ["float", "int8", np.float32, None],
    "max_model_len": [0, -1, 1.0, True, "64"],
    "page_size": [0, 17, 16.0, True, "16"],
    "num_pages": [0, -5, 2.5, True, "8"],
    "memory_utilization": [0, 0.0, -0.1, 1.01, math.nan, math.inf, True, "0.5", None],
    "max_num_seqs": [0, -1, 1.5, True, "8", None],
    "max_num_batched_tokens": [0, -1, 1.5, False, "8", None],
    "scheduling_policy": ["lifo", "FCFS", True, None],
    "priority_aging_s": [0, -1.0, math.nan, math.inf, True, "1", 5.0],  # the last without the policy
    "enable_prefix_caching": [0, 1, "true", None],
    "enable_chunked_prefill": [0, 1, "true", None],
    "async_scheduling": [0, 1, "true", None],
    "attention_backend": ["pallas", "XLA", None, 1],
    "deterministic": [0, 1, "true", "yes", None],
    "seed": [1.0, True, 2**63, -(2**63) - 1, "7", None],
    "generation_config": ["none ", "vllm", True, None],
    "compile": ["warm-up", "eager", True, None],
    "compilation_cache_dir": [3, False],
    "speculative_config": ["ngram", 3, ["ngram"], True],
    "runner": ["embed", "Pooling", None, True],
    "pooler_config": ["MEAN", 3, ["MEAN"], True],
    "mesh": ["model", 2, (1, 2)],
}
WRONG_SPECULATION = {
    "method": ["n-gram", "lookahead", None, 1],
    "model": ["a-model", 3],  # the first does not go with the method ngram
    "num_speculative_tokens": [0, -1, 16, 2.0, True, None],
    "acceptance": ["Rejection", "typical", "", None, True],
    "length_control": ["automatic", None, True],
    "draft_lengths": [(3, 1), (-1,), ("1",), 3, (1, 1), None],
    "prompt_lookup": [False, 1, "yes"],  # the first does not go with the method ngram
    "prompt_lookup_min": [0, 5, 1.5],  # more than prompt_lookup_max
    "prompt_lookup_max": [0, True, None],
    "draft_confidence_threshold": [-0.1, 1.1, float("nan"), "0.1", True],
}


def test_every_field_has_wrong_values_below():
    assert set(WRONG) == {field.name for field in dataclasses.fields(EngineConfig)}


def test_wrong_values_of_speculation_are_refused_with_field_value_and_rule():
    assert set(WRONG_SPECULATION) == {field.name for field in dataclasses.fields(SpeculativeConfig)}
    for field, values in WRONG_SPECULATION.items():
        for value in values:
            with pytest.raises(ValueError, match=r"=.*: \w+ must be ") as error:
                SpeculativeConfig(**{"method": "ngram", field: value})
            assert field in str(error.value)
            assert repr(value) in str(error.value)


def test_what_goes_with_a_method_is_its_default():
    chosen = lambda **given: operator.attrgetter(
        "prompt_lookup", "prompt_lookup_min", "prompt_lookup_max", "draft_confidence_threshold"
    )(SpeculativeConfig(**given))
    assert chosen(method="ngram") == (True, 1, 4, 0.1)
    assert chosen(method="ngram", acceptance="rejection", length_control="fixed") == (True, 1, 4, 0.0)
    assert chosen(method="eagle") == (True, 2, 4, 0.1)
    assert chosen(method="eagle", prompt_lookup_max=1, draft_confidence_threshold=0) == (True, 1, 1, 0)
    assert chosen(method="medusa", prompt_lookup=False, length_control="fixed") == (False, 2, 4, 0.0)
    assert chosen(method="draft_model", acceptance="rejection") == (False, 2, 4, 0.1)
    with pytest.raises(
        ValueError, match=r"^prompt_lookup=True: prompt_lookup must be False or None with method='eagle'"
    ):
        SpeculativeConfig(method="eagle", acceptance="rejection", prompt_lookup=True)
    with pytest.raises(
        ValueError, match=r"^prompt_lookup_max=1: prompt_lookup_max must be at least prompt_lookup_min=2"
    ):
        SpeculativeConfig(method="eagle", prompt_lookup_min=2, prompt_lookup_max=1)


def test_wrong_values_of_pooling_are_refused():
    for values in ({"pooling_type": "mean"}, {"pooling_type": "CLS"}, {"normalize": 1}, {"normalize": "yes"}):
        [(field, value)] = values.items()
        with pytest.raises(ValueError, match=f"^{field}={value!r}: {field} must be one of None, "):
            EngineConfig(pooler_config=values)
    with pytest.raises(TypeError, match="did you mean 'pooling_type'"):
        EngineConfig(pooler_config={"pooling": "MEAN"})


def test_speculation_may_be_a_dict():
    config = EngineConfig(speculative_config={"method": "ngram", "draft_lengths": [0, 2]})
    assert config.speculative_config == SpeculativeConfig(method="ngram", draft_lengths=(0, 2))
    with pytest.raises(TypeError, match="did you mean 'num_speculative_tokens'"):
        EngineConfig(speculative_config={"method": "ngram", "num_speculative_token": 3})


@pytest.mark.parametrize("field", WRONG)
def test_wrong_values_are_refused_with_field_value_and_rule(field):
    for value in WRONG[field]:
        with pytest.raises(ValueError, match=f"^{field}=.*: {field} must be ") as error:
            EngineConfig(**{field: value})
        assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("field", "wrong", "right"),
    [
        ("dtype", "bfloat", "bfloat16"),
        ("compile", "warm-up", "warmup"),
        ("attention_backend", "XLA", "xla"),
        ("scheduling_policy", "prio", "priority"),
    ],
)
def test_a_wrong_choice_is_refused_with_the_nearest(field, wrong, right):
    with pytest.raises(ValueError, match=f"did you mean '{right}'"):
        EngineConfig(**{field: wrong})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("max-num-batched-tokens", "max_num_batched_tokens"),
        ("enablePrefixCaching", "enable_prefix_caching"),
        ("gpu_memory_utilization", "memory_utilization"),
        ("page_sizes", "page_size"),
    ],
)
def test_wrong_names_are_refused_with_the_nearest(wrong, right):
    with pytest.raises(TypeError, match=f"EngineConfig has no field '{wrong}': did you mean '{right}'"):
        EngineConfig.from_dict({wrong: 1})


def test_a_name_like_no_other_lists_them_all():
    with pytest.raises(TypeError, match=r"it has model, tokenizer, .*mesh"):
        EngineConfig.from_dict({"zzzz": 1})


def test_right_values_are_kept():
    values = {
        "model": Path("a/folder"),
        "tokenizer": "owner/name",
        "dtype": "float16",
        "max_model_len": 1,
        "page_size": 256,
        "num_pages": 1,
        "memory_utilization": 1,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "scheduling_policy": "priority",
        "priority_aging_s": 30,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "async_scheduling": False,
        "linear_backend": "xla",
        "attention_backend": "reference",
        "deterministic": True,
        "seed": -(2**63),
        "generation_config": "none",
        "compile": "warmup",
        "compilation_cache_dir": "",
        "speculative_config": SpeculativeConfig(method="draft_model", model="a-model", num_speculative_tokens=15),
        "runner": "pooling",
        "pooler_config": PoolerConfig(pooling_type="MEAN", normalize=False),
        "mesh": jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("model",)),
    }
    config = EngineConfig.from_dict(values)
    assert {name: getattr(config, name) for name in values} == values
    assert set(values) == set(WRONG)


def test_it_is_frozen_and_takes_keywords_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 1
    with pytest.raises(TypeError):
        EngineConfig("a/folder")


def test_defaults():
    config = EngineConfig()
    assert (config.model, config.dtype, config.max_model_len, config.num_pages) == (None, "auto", None, None)
    assert (config.page_size, config.max_num_seqs, config.max_num_batched_tokens) == (None, 64, 128)
    assert (config.enable_prefix_caching, config.enable_chunked_prefill, config.async_scheduling) == (True, True, True)
    assert (config.scheduling_policy, config.priority_aging_s) == ("fcfs", None)
    assert (config.deterministic, config.compile, config.attention_backend) == ("auto", "lazy", "auto")


def test_where_things_are_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    assert EngineConfig().compilation_cache() == tmp_path / "compiled"
    assert EngineConfig(compilation_cache_dir=tmp_path / "x").compilation_cache() == tmp_path / "x"
    assert EngineConfig(compilation_cache_dir="").compilation_cache() is None
    monkeypatch.setenv("JAXSERVE_CACHE", "")
    assert cache_folder() == Path("~/.cache/jaxserve").expanduser()
