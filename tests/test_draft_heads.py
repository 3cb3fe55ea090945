"""Draft heads: what they draft is what the published recipes say, and the output is what it is without them."""

import json
from collections import Counter

import draft_head_tools as tools
import engine_tools
import jax
import numpy as np
import pytest
from engine_tools import assert_same, requests_for, run, tiny_decoder
from flax import nnx
from ngram_tools import search

from jaxserve import SamplingParams
from jaxserve.checkpoint.draft_head import load_head, read_head, save_head
from jaxserve.models.config import CheckpointError, UnsupportedModelError
from jaxserve.models.weights import random_decoder

CASES = [
    pytest.param({"method": "eagle", "reduced": False}, id="eagle", marks=pytest.mark.slow),
    pytest.param({"method": "eagle", "reduced": True, "bias": True}, id="eagle, bias and reduced"),
    pytest.param({"method": "eagle", "reduced": True, "window": 11}, id="eagle, window"),
    pytest.param({"method": "eagle3", "reduced": True}, id="eagle3"),
    pytest.param({"method": "medusa", "reduced": False}, id="medusa", marks=pytest.mark.slow),
    pytest.param({"method": "medusa", "reduced": True, "bias": True}, id="medusa, bias and reduced"),
]
ALONE = {"num_speculative_tokens": 3, "length_control": "fixed", "prompt_lookup": False}


def head_engine(folder, method, dtype="float32", **options):
    speculative = {"method": method, "model": str(folder), **ALONE}
    defaults = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "speculative_config": speculative}
    return engine_tools.tiny_engine(dtype, **{**defaults, **options})


def watch_drafts(engine, seen: list[tuple[list[int], list[int], int]]) -> None:
    """Note the text of each proposal, the drafts behind it, and how many were wanted."""
    propose = engine.runner._propose

    def watched(program, runs, new_pages):
        propose(program, runs, new_pages)
        slots = engine.runner.slots
        history, computed, held = map(np.asarray, (slots.history, slots.num_computed, slots.num_drafts))
        for slot, drafts in zip(runs.slots, runs.drafts, strict=True):
            end = int(computed[slot]) + 1
            assert held[slot] <= drafts
            seen.append((history[slot, :end].tolist(), history[slot, end : end + held[slot]].tolist(), int(drafts)))

    engine.runner._propose = watched


def agreement(recipe: tools.Recipe, seen) -> tuple[int, int]:
    """How many drafts are the recipe's, of how many; those after a near tie do not count."""
    same = clear = 0
    for text, drafts, wanted in seen:
        assert len(drafts) == wanted
        expected, margin = recipe.drafts(text, len(drafts))
        if margin > 1e-3:
            clear += len(drafts)
            same += sum(a == b for a, b in zip(drafts, expected, strict=True))
    return same, clear


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_the_recipe(tmp_path, case):
    """Alone and together, after accepted and rejected drafts, over cached prefixes, chunks and branches."""
    window = case.get("window", tools.LONGEST)
    tensors = tools.head_tensors(**{name: value for name, value in case.items() if name != "window"})
    folder = tools.write_head(tmp_path, case["method"], tensors, sliding_window=window)
    seen = []
    with head_engine(folder, case["method"]) as engine:
        watch_drafts(engine, seen)
        shared = [(7 * i) % 290 + 3 for i in range(70)]
        params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
        requests = [(shared, params), ([5], params), ([9, 30, 12], params)]
        run(engine, requests)
        run(engine, [(shared[:48], params), ([*shared[:40], 8, 9], params), (shared[:64], params)])
        assert engine.stats()["prefix_cache_hits"] > 0
    assert len(seen) > 20
    same, clear = agreement(tools.Recipe(case["method"], tensors, tiny_decoder("float32"), window), seen)
    assert same == clear > 30


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_the_text_itself_comes_first_and_an_unsure_head_ends(tmp_path, method):
    """In one step: drafts that are looked up, drafts of the head where nothing is found, and those it ends early."""
    tensors = tools.head_tensors(method, reduced=True)
    peaked = {name: 4 * value if name.startswith("lm_head") else value for name, value in tensors.items()}
    folder, threshold, seen = tools.write_head(tmp_path, method, peaked), 0.2, []
    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 3, "draft_confidence_threshold": threshold}
    config = {"method": method, "model": str(folder), **ALONE, "prompt_lookup": True, **lookup}
    with head_engine(folder, method, speculative_config=config) as engine:
        watch_drafts(engine, seen)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        run(engine, [(prompt, params) for prompt in ([5], [9, 30, 12], [40, 41] * 3, [7])])
    recipe, kinds = tools.Recipe(method, peaked, tiny_decoder("float32")), Counter()
    for text, drafts, wanted in seen:
        expected, margin, kind = search(text, 2, 3, wanted), np.inf, "looked up"
        if expected is None:
            expected, margin = recipe.drafts(text, wanted, threshold)
            kind = "whole" if len(expected) == wanted else "ended"
        if margin > 1e-3:
            assert drafts == expected
            kinds[kind] += 1
    assert min(kinds[kind] for kind in ("looked up", "whole", "ended")) > 3, kinds


@pytest.mark.slow
def test_a_head_that_is_right_is_accepted(tmp_path):
    """A target whose layers add nothing, and a head that hands on the embedding of its token: they say the same."""
    target = tiny_decoder("float32", num_hidden_layers=1)
    tensors = tools.head_tensors("eagle", reduced=False)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    tensors["fc.weight"] = np.eye(tools.HIDDEN, 2 * tools.HIDDEN, dtype=np.float32)
    silent = nnx.clone(target)
    silent.layers[0].out[...] = silent.layers[0].out[...] * 0
    silent.layers[0].down[...] = silent.layers[0].down[...] * 0
    silent.norm.scale[...] = silent.norm.scale[...] * 0 + 1
    folder = tools.write_head(tmp_path, "eagle", tensors)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with head_engine(folder, "eagle", decoder=silent) as engine:
        results = run(engine, [([index + 10, 20, 30], params) for index in range(4)])
        stats = engine.stats()
    # The norm scales a row, so the likeliest token is that of the embedding itself: the same token again and again.
    assert all(result.outputs[0].token_ids == [30] * 20 for result in results)
    assert stats["spec_num_accepted_tokens"] == stats["spec_num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("method", "options"),
    [
        pytest.param("eagle", {}, id="eagle"),
        pytest.param("eagle", {"async_scheduling": False}, id="eagle, without overlap"),
        pytest.param("eagle3", {"attention_backend": "xla"}, id="eagle3, xla"),
        pytest.param("medusa", {"async_scheduling": False}, id="medusa, without overlap"),
        pytest.param("medusa", {"attention_backend": "xla"}, id="medusa, xla"),
    ],
)
@pytest.mark.slow
def test_the_same_as_without(tmp_path, method, options):
    requests = requests_for(300, 14, longest=100, max_tokens=24)
    backend = {name: value for name, value in options.items() if name == "attention_backend"}
    with head_engine("", method, "bfloat16", speculative_config=None, **backend) as engine:
        expected = run(engine, requests)
    folder = tools.write_head(tmp_path, method, tools.head_tensors(method, reduced=True))
    with head_engine(folder, method, "bfloat16", **options) as engine:
        assert_same(run(engine, requests), expected)
        assert_same(run(engine, requests[::4]), expected[::4])  # cached
        stats = engine.stats()
        assert stats["spec_num_draft_tokens"] > stats["spec_num_accepted_tokens"] > 0


def test_new_weights_of_the_target(tmp_path):
    """A reduced head uses columns of the target's: those of the new weights after an update."""
    tensors = tools.head_tensors("eagle", reduced=True, bias=True)
    folder = tools.write_head(tmp_path, "eagle", tensors)
    other = random_decoder(tiny_decoder("float32").config, seed=5)
    seen = []
    with head_engine(folder, "eagle") as engine:
        watch_drafts(engine, seen)
        engine.update_params(other)
        run(engine, [([4, 8, 15, 16], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))])
    same, clear = agreement(tools.Recipe("eagle", tensors, other), seen)
    assert same == clear > 20


def test_int8(tmp_path):
    for method, reduced in (("eagle", True), ("eagle3", True)):
        tensors = tools.head_tensors(method, reduced=reduced)
        folder = tools.write_head(tmp_path / method, method, tensors)
        target = tiny_decoder("float32").config
        head = load_head(folder, read_head(folder, method, target), np.float32)
        for int8 in (False, True):
            save_head(head, tmp_path / "saved", int8=int8)
            config = read_head(tmp_path / "saved", method, target)
            assert config == head.config
            again = load_head(tmp_path / "saved", config, np.float32)
            for old, new in zip(*map(jax.tree.leaves, (nnx.state(head), nnx.state(again))), strict=True):
                old, new = np.asarray(old, np.float64), np.asarray(new, np.float64)
                bound = np.abs(old).max() / 254 * 1.001 if int8 and old.ndim > 1 else 0.0
                assert np.abs(old - new).max() <= bound
                assert (bound == 0) == (old == new).all()


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_tensors_that_do_not_fit(tmp_path, method):
    target = tiny_decoder().config
    tensors = tools.head_tensors(method, reduced=True)
    named = {f"model.{name.replace('midlayer.', 'layers.0.')}": value for name, value in tensors.items()}
    read_head(tools.write_head(tmp_path / "renamed", method, named), method, target)
    gone = {name: value for name, value in tensors.items() if "up_proj" not in name} | {"foo": np.zeros(3, np.float32)}
    with pytest.raises(CheckpointError, match=r"missing: layers.0.mlp.up_proj.weight; not used by the model: foo"):
        read_head(tools.write_head(tmp_path / "gone", method, gone), method, target)
    wrong = {**tensors, "fc.weight": np.zeros((64, 100), np.float32)}
    with pytest.raises(CheckpointError, match=r"'fc.weight' has shape \[64, 100\]"):
        read_head(tools.write_head(tmp_path / "wrong", method, wrong), method, target)
    falling = {**tensors, "d2t": tensors["d2t"][::-1].copy()}
    with pytest.raises(CheckpointError, match="ascend"):
        read_head(tools.write_head(tmp_path / "falling", method, falling), method, target)
    for other in {"eagle", "eagle3", "medusa"} - {method}:
        folder = tools.write_head(tmp_path / "other", other, named)
        with pytest.raises(CheckpointError, match="do not fit a head for the method"):
            read_head(folder, other, target)


def test_medusa_by_any_name(tmp_path):
    """Of its authors and of vLLM, with a prefix, in another file; heads over all tokens cut to the map's, or one."""
    target = tiny_decoder("float32").config
    tensors = tools.head_tensors("medusa", reduced=True, bias=True)
    folder = tools.write_head(tmp_path / "vllm", "medusa", tensors)
    config = read_head(folder, "medusa", target)
    assert (config.num_heads, config.num_layers, config.bias, config.shared) == (4, 2, True, False)
    expected = loaded(folder, config)
    ids, last = tensors["token_map"], f"medusa_head.{{}}.{tools.MEDUSA_LAYERS}.weight"
    assert (expected.token_ids[...] == np.sort(ids)).all()
    renamed = {}
    for name, value in tensors.items():
        if name.startswith("blocks."):
            _, head, _, layer, kind = name.split(".")
            renamed[f"medusa_head.{head}.{layer}.linear.{kind}"] = value
        elif name.startswith("lm_heads."):
            whole = np.zeros((tools.VOCAB, tools.HIDDEN), np.float32)
            whole[ids] = value
            renamed[last.format(name.split(".")[1])] = whole
    other = tools.write_head(tmp_path / "authors", "medusa", {**renamed, "token_map": ids}, medusa_num_heads=2)
    (other / "model.safetensors").rename(other / "medusa_lm_head.safetensors")
    assert_equal(loaded(other, read_head(other, "medusa", target)), expected)
    one = {name: value for name, value in tensors.items() if not name.startswith("lm_heads.")}
    for name in ("lm_head.weight", "lm_heads.0.weight"):
        one_head = {**one, name: tensors["lm_heads.0.weight"]}
        folder = tools.write_head(tmp_path / name, "medusa", one_head, original_lm_head=True)
        config = read_head(folder, "medusa", target)
        assert (config.num_heads, config.shared) == (4, True)
        [head] = loaded(folder, config).lm_heads
        assert (head[...] == expected.lm_heads[0][...]).all()


def loaded(folder, config):
    return load_head(folder, config, np.float32)


def assert_equal(head, other) -> None:
    for one, two in zip(*map(jax.tree.leaves, (nnx.state(head), nnx.state(other))), strict=True):
        assert (one == two).all()


def test_medusa_that_does_not_fit(tmp_path):
    target, tensors = tiny_decoder("float32").config, tools.head_tensors("medusa", reduced=True)

    def read(tensors, **changes):
        return read_head(tools.write_head(tmp_path, "medusa", tensors, **changes), "medusa", target)

    with pytest.raises(CheckpointError, match=r"missing: blocks.3.layers.0.weight"):
        read({name: value for name, value in tensors.items() if name != "blocks.3.layers.0.weight"})
    with pytest.raises(CheckpointError, match=r"'lm_heads.1.weight' has shape \[99, 7\]"):
        read({**tensors, "lm_heads.1.weight": np.zeros((99, 7), np.float32)})
    for wrong in (300, tensors["token_map"][1]):
        with pytest.raises(CheckpointError, match=r"token_map: the ids.*must be different ones below 300"):
            read({**tensors, "token_map": np.append(wrong, tensors["token_map"][1:])})
    with pytest.raises(UnsupportedModelError, match="logit_scale=2"):
        read(tensors, logit_scale=2)
    (tmp_path / "model.safetensors").rename(tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UnsupportedModelError, match=r"medusa_lm_head.pt: only safetensors files are read; convert it"):
        read_head(tmp_path, "medusa", target)
    folder = tools.write_head(tmp_path, "medusa", tensors)
    speculative = {"method": "medusa", "model": str(folder), "num_speculative_tokens": 5}
    with pytest.raises(ValueError, match=r"num_speculative_tokens=5: it must be at most 4, the number of heads"):
        head_engine(folder, "medusa", speculative_config=speculative)


def test_heads_that_are_not_used_are_not_loaded(tmp_path):
    folder = tools.write_head(tmp_path, "medusa", tools.head_tensors("medusa", reduced=True))
    with head_engine(folder, "medusa") as engine:
        assert len(engine.runner.weights.draft.lm_heads) == len(engine.runner.weights.draft.blocks) == 3
        assert len(engine.runner.kv) == 2  # the target's layers


def test_configurations_that_do_not_fit(tmp_path):
    tensors, target = tools.head_tensors("eagle", reduced=False), tiny_decoder().config
    read = lambda **changes: read_head(tools.write_head(tmp_path, "eagle", tensors, **changes), "eagle", target)
    with pytest.raises(UnsupportedModelError, match="num_hidden_layers=2"):
        read(num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="hidden_size=32"):
        read(hidden_size=32)
    with pytest.raises(CheckpointError, match=r"sliding_window=0: must be a positive integer"):
        read(sliding_window=0)
    assert read(sliding_window=4096, use_sliding_window=False).layer.windows == (None,)
    third = tools.head_tensors("eagle3", reduced=True)
    folder = tools.write_head(tmp_path, "eagle3", third, eagle_config={"eagle_aux_hidden_state_layer_ids": [9]})
    with pytest.raises(CheckpointError, match="from 0 to 2"):
        read_head(folder, "eagle3", target)
    (tmp_path / "config.json").write_text(json.dumps([]))
    with pytest.raises(CheckpointError, match="not a JSON object"):
        read_head(tmp_path, "eagle", target)
    with pytest.raises(ValueError, match=r"speculative_config.model=None"):
        engine_tools.tiny_engine(speculative_config={"method": "eagle"})
    with pytest.raises(ValueError, match="must be one for 'eagle'"):
        engine_tools.tiny_engine(speculative_config={"method": "eagle"}, draft_decoder=tiny_decoder())
