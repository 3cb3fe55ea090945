"""Weights taken from a Flax model and replaced while the engine runs, against engines that had them from the start."""

import gc
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_tools import TINY, assert_same, requests_for, run, tiny_engine
from flax import nnx

from jaxserve import Engine, SamplingParams
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder, causal_attention
from jaxserve.models.weights import random_decoder
from jaxserve.runner import determinism
from jaxserve.runner.weights import flatten, parameter_names
from jaxserve.weights_update import host_parameters, named_parameters

VOCAB = 300
PROMPT = list(range(20, 60))
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True, logprobs=2)
SHAPES = {"num_pages": 512, "max_num_seqs": 32, "max_num_batched_tokens": 256, "deterministic": True}
REQUESTS = requests_for(VOCAB, 8, longest=60, max_tokens=8)


@pytest.fixture(scope="module", autouse=True)
def trusted():
    """Other tests test this machine for determinism."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(determinism, "row_invariance", lambda *_: None)
        yield


def fresh(seed: int, dtype="float32", **changes) -> Decoder:
    """A model with arrays of its own."""
    return random_decoder(ModelConfig.from_hf({**TINY, **changes}), seed=seed, dtype=jnp.dtype(dtype))


def tiny_engine_over(model, **options):
    return tiny_engine(decoder=model, **options)


@pytest.fixture(scope="module")
def old():
    """An engine that has had the weights of seed 2 from the start, and so forever."""
    with tiny_engine_over(fresh(2)) as engine:
        yield engine


@pytest.fixture(scope="module")
def new():
    """The same with seed 3."""
    with tiny_engine_over(fresh(3)) as engine:
        yield engine


@pytest.fixture(scope="module")
def results(old, new):
    """By the seed of the model: its answers."""
    return {2: run(old, REQUESTS), 3: run(new, REQUESTS)}


@pytest.fixture(scope="module")
def shared():
    with Engine.from_flax(fresh(2), **SHAPES) as engine:
        yield engine


@pytest.fixture
def engine(shared):
    """It has the weights of seed 2; whole and idle after each test."""
    shared.update_params(fresh(2), version=0)
    yield shared
    while shared.has_unfinished():
        shared.step()
    shared.check_integrity()
    assert shared.scheduler.pool.num_free == shared.scheduler.pool.num_pages


def spread(model):
    """The forms in which the same parameters may come."""
    state = nnx.state(model)
    return {
        "model": model,
        "state": state,
        "pure dict": nnx.to_pure_dict(state),
        "named arrays of NumPy": host_parameters(model),
    }


# ---- what an update does --------------------------------------------------------------------------------


def test_from_flax_gives_what_the_model_gives(engine, results):
    assert_same(run(engine, REQUESTS), results[2])


@pytest.mark.parametrize("form", ["model", "state", "pure dict", "named arrays of NumPy"])
def test_after_an_update_nothing_is_left_of_the_old_weights(engine, results, form):
    """Not in the prefix cache either: the same requests ran just before. And nothing is compiled again."""
    assert_same(run(engine, REQUESTS), results[2])
    before = engine.stats()
    assert engine.scheduler.pool.num_cached > 0
    engine.update_params(spread(fresh(3))[form])
    assert engine.scheduler.pool.num_cached == 0
    assert_same(run(engine, REQUESTS), results[3])
    after = engine.stats()
    assert after["compilations"] == before["compilations"]
    assert after["weights_version"] == before["weights_version"] + 1


def test_float32_parameters_are_cast_to_the_engines_dtype():
    rounded = lambda seed: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), fresh(seed))
    with Engine.from_flax(fresh(2), dtype="bfloat16", **SHAPES) as engine:
        jax.tree.map(np.testing.assert_array_equal, engine.runner.weights, flatten(rounded(2))[1])
        engine.update_params(fresh(3))
        result = run(engine, [(PROMPT, SAMPLED)])
    with tiny_engine_over(rounded(3)) as other:
        assert_same(result, run(other, [(PROMPT, SAMPLED)]))


def test_names_follow_the_order_of_the_weights():
    """Untied and with every optional parameter: each array of the flattened model is found by its name."""
    model = fresh(4, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False)
    _, weights = flatten(model)
    named = named_parameters(model, model.config)
    names = parameter_names(model.config)
    assert jax.tree.structure(names) == jax.tree.structure(weights)
    assert all(named[name] is leaf for name, leaf in zip(*map(jax.tree.leaves, (names, weights)), strict=True))
    assert set(jax.tree.leaves(names)) == set(named)


def test_an_untied_head_is_replaced():
    changes = {"tie_word_embeddings": False}
    with Engine.from_flax(fresh(2, **changes), **SHAPES) as engine:
        engine.update_params(fresh(3, **changes))
        jax.tree.map(np.testing.assert_array_equal, engine.runner.weights, flatten(fresh(3, **changes))[1])


def test_on_a_mesh_every_parameter_keeps_its_place(cpu_devices):
    mesh = jax.sharding.Mesh(np.array(cpu_devices[:2]), ("model",))
    small = {"num_hidden_layers": 1}
    options = {"mesh": mesh, "num_pages": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64, "deterministic": False}
    with Engine.from_flax(fresh(2, **small), **options) as engine:
        places = jax.tree.map(lambda leaf: leaf.sharding, engine.runner.weights)
        assert any(not place.is_fully_replicated for place in jax.tree.leaves(places))
        run(engine, [(PROMPT, replace(SAMPLED, max_tokens=2))])
        compilations = engine.stats()["compilations"]
        engine.update_params(fresh(3, **small))
        assert jax.tree.map(lambda leaf: leaf.sharding, engine.runner.weights) == places
        jax.tree.map(np.testing.assert_array_equal, engine.runner.weights, flatten(fresh(3, **small))[1])
        run(engine, [(PROMPT, replace(SAMPLED, max_tokens=2))])
        assert engine.stats()["compilations"] == compilations


# ---- whose arrays they are ------------------------------------------------------------------------------


def donating_step(model):
    """A training step that donates: the old parameters are deleted."""
    graph, state = nnx.split(model)
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    new = step(state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    return nnx.merge(graph, new)


def test_a_training_step_that_donates_deletes_nothing_of_the_engines(results):
    trained = fresh(2)
    with Engine.from_flax(trained, **SHAPES) as engine:
        donating_step(trained)
        assert_same(run(engine, REQUESTS), results[2])
        trained = fresh(3)
        engine.update_params(trained)
        donating_step(trained)
        assert_same(run(engine, REQUESTS), results[3])


def test_an_update_deletes_nothing_of_the_trainers(engine):
    models = [fresh(2), fresh(3)]
    values = [jax.tree.map(np.array, nnx.state(model)) for model in models]
    with Engine.from_flax(models[0], copy=False, **SHAPES) as borrower:
        for index in (1, 0, 1):
            borrower.update_params(models[index], copy=False)
            engine.update_params(models[index])
            run(borrower, [(PROMPT, replace(SAMPLED, max_tokens=2))])
    for model, value in zip(models, values, strict=True):
        jax.tree.map(np.testing.assert_array_equal, nnx.state(model), value)


def test_changing_the_trainers_numpy_arrays_afterwards_changes_nothing(engine, results):
    arrays = host_parameters(fresh(3))
    arrays = {name: np.array(value) for name, value in arrays.items()}
    engine.update_params(arrays)
    for value in arrays.values():
        value[...] = np.nan
    assert_same(run(engine, REQUESTS), results[3])


def test_memory_does_not_grow(engine):
    models = [fresh(2), fresh(3)]
    sizes = []
    for index in range(6):
        engine.update_params(models[index % 2])
        run(engine, [(PROMPT, replace(SAMPLED, max_tokens=2))])
        gc.collect()
        sizes.append((len(jax.live_arrays()), sum(array.nbytes for array in jax.live_arrays())))
    assert len(set(sizes)) == 1


# ---- what is refused ------------------------------------------------------------------------------------


def broken(change):
    """Parameters by name of which one was changed."""
    named = dict(host_parameters(fresh(3)))
    change(named)
    return named


def deleted():
    model = fresh(3)
    model.layers[1].down[...].delete()
    return model


WRONG = [
    (lambda: broken(lambda n: n.pop("layers.0.qkv")), r"^params: 'layers.0.qkv' is missing"),
    (lambda: broken(lambda n: n.update(extra=n["embed"])), r"^params: 'extra' is no parameter of this model"),
    (
        lambda: broken(lambda n: n.update({"layers.1.down": n["layers.1.down"].T})),
        r"^params: 'layers.1.down' has shape \[64, 128\]: it must have \[128, 64\]",
    ),
    (
        lambda: broken(lambda n: n.update({"norm.scale": n["norm.scale"].astype(np.int32)})),
        r"^params: 'norm.scale' has dtype int32: it must have a float dtype",
    ),
    (lambda: broken(lambda n: n.update({"norm.scale": 1.0})), r"^params: 'norm.scale' is a float: it must be an array"),
    (lambda: fresh(3, num_hidden_layers=1), r"^params: 'layers.1.attention_norm.scale' is missing"),
    (lambda: fresh(3, num_hidden_layers=3), r"^params: 'layers.2.attention_norm.scale' is no parameter"),
    (lambda: fresh(3, tie_word_embeddings=False), r"^params: 'head' is no parameter"),
    (deleted, r"^params: 'layers.1.down' is deleted"),
    (lambda: None, r"^params: 'embed' is missing"),
]


@pytest.mark.parametrize(("params", "message"), WRONG)
def test_wrong_parameters_change_nothing(engine, params, message):
    engine.add_request("a", PROMPT, replace(SAMPLED, max_tokens=4))
    engine.step()
    weights, cached = engine.runner.weights, engine.scheduler.pool.num_cached
    with pytest.raises(ValueError, match=message):
        engine.update_params(params())
    assert engine.runner.weights is weights
    assert engine.scheduler.pool.num_cached == cached
    assert engine.weights_version == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"running": "drop"}, "^running='drop': running must be one of 'recompute', 'keep'"),
        ({"version": -1}, "^version=-1"),
        ({"version": 1.5}, r"^version=1\.5"),
        ({"version": True}, "^version=True"),
    ],
)
def test_wrong_options_are_refused(engine, options, message):
    with pytest.raises(ValueError, match=message):
        engine.update_params(fresh(3), **options)


def test_from_flax_takes_a_decoder_and_options_once():
    with pytest.raises(ValueError, match=r"^model: State: must be a jaxserve.models.decoder.Decoder"):
        Engine.from_flax(nnx.state(fresh(2)))
    with pytest.raises(TypeError, match=r"^EngineConfig has no field 'pages'"):
        Engine.from_flax(fresh(2), pages=3)


def test_an_update_that_fails_half_way_closes_the_engine(monkeypatch):
    with Engine.from_flax(fresh(2), **SHAPES) as engine:
        monkeypatch.setattr("jaxserve.weights_update.tied_head", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.update_params(fresh(3))
        with pytest.raises(RuntimeError, match="this engine is closed"):
            engine.step()


# ---- running requests -----------------------------------------------------------------------------------


def run_with_update(engine, requests, steps, **options):
    """All requests together, the weights of seed 3 (version 9) after some calls of `step`.

    Returns the results in order, and how many steps had been dispatched when the weights changed.
    """
    at = -engine.stats()["steps"]
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(f"{index}", prompt, params)
    results = {}
    while engine.has_unfinished():
        if steps == 0:
            engine.update_params(fresh(3), version=9, **options)
            at += engine.stats()["steps"]
        steps -= 1
        for delta in engine.step():
            results.setdefault(delta.request_id, delta)
            if results[delta.request_id] is not delta:
                results[delta.request_id].extend(delta)
    return [results[f"{index}"] for index in range(len(requests))], at


def part(output, start, end=None):
    return output.token_ids[start:end], output.logprobs[start:end]


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_recomputed_requests_go_on_as_if_the_tokens_so_far_had_been_their_prompt(
    engine, old, new, steps, async_scheduling, monkeypatch
):
    """Before the update every bit is the old engine's; after it, that of a new engine given prompt and tokens so far.

    The noise of sampling depends on seed and position alone, so the continuation is bitwise the same.
    """
    monkeypatch.setattr(engine, "config", replace(engine.config, async_scheduling=async_scheduling))
    requests = [(PROMPT, SAMPLED), (PROMPT[:3], replace(SAMPLED, seed=6)), (PROMPT, replace(SAMPLED, temperature=0))]
    found, done = run_with_update(engine, requests, steps)
    assert steps - 1 <= done <= steps  # a step that waits for a compilation is not dispatched
    for (prompt, params), result, before in zip(requests, found, run(old, requests), strict=True):
        [output] = result.outputs
        assert output.weights_versions == [0] * done + [9] * (30 - done)  # the step in flight is the old weights'
        assert part(output, 0, done) == part(before.outputs[0], 0, done)
        again = replace(params, max_tokens=30 - done)
        [after] = run(new, [(prompt + output.token_ids[:done], again)])
        assert part(output, done) == part(after.outputs[0], 0)


def logits_over_old_keys(old: Decoder, new: Decoder, tokens: list[int], kept: int) -> np.ndarray:
    """The definition of `keep`: the new model's logits where the first `kept` keys and values are the old model's."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    taken = []

    def take(q, k, v, **options):
        taken.append((k, v))
        return causal_attention(q, k, v, **options)

    def use(q, k, v, **options):
        old_k, old_v = taken.pop(0)
        k, v = (jnp.concatenate([mine[:kept], its[kept:]]) for mine, its in ((old_k, k), (old_v, v)))
        return causal_attention(q, k, v, **options)

    def compute(old, new, tokens):
        old(tokens, positions, take)
        return new.logits(new(tokens, positions, use))

    return np.asarray(nnx.jit(compute)(old, new, jnp.asarray(tokens, jnp.int32)))


def test_kept_requests_go_on_over_the_old_keys_and_values(engine):
    greedy = replace(SAMPLED, temperature=0)
    run(engine, [(PROMPT, greedy)])  # everything is compiled, so that seven calls are seven steps
    engine.update_params(fresh(2), version=0)
    [result], done = run_with_update(engine, [(PROMPT, greedy)], 7, running="keep")
    [output] = result.outputs
    assert done == 7
    assert output.weights_versions == [0] * 7 + [9] * 23
    tokens = PROMPT + output.token_ids
    kept = len(PROMPT) + 7 - 1  # the seventh token was sampled by the old weights and is computed by the new ones
    logits = logits_over_old_keys(fresh(2), fresh(3), tokens, kept)[len(PROMPT) + 7 - 1 : -1]
    exact = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
    got = [entry[token].logprob for token, entry in zip(*part(output, 7), strict=True)]
    np.testing.assert_allclose(got, exact[np.arange(23), output.token_ids[7:]], atol=2e-4)
    recomputed = logits_over_old_keys(fresh(2), fresh(3), tokens, 0)[len(PROMPT) + 7 - 1 : -1]
    assert np.abs(recomputed - logits).max() > 0.1  # the test can tell the two apart


def test_kept_pages_are_nobodys_prefix(engine, results):
    """New requests with the prompts of kept ones compute them anew; kept ones that are gone leave nothing behind."""
    long = [(prompt, replace(params, max_tokens=40, ignore_eos=True, n=1)) for prompt, params in REQUESTS]
    for index, (prompt, params) in enumerate(long):
        engine.add_request(f"kept {index}", prompt, params)
    for _ in range(3):
        engine.step()
    engine.update_params(fresh(3), running="keep")
    for index, (prompt, params) in enumerate(REQUESTS):
        engine.add_request(f"new {index}", prompt, params)
    found = {}
    while engine.has_unfinished():
        for delta in engine.step():
            found.setdefault(delta.request_id, delta)
            if found[delta.request_id] is not delta:
                found[delta.request_id].extend(delta)
    assert_same([found[f"new {index}"] for index in range(len(REQUESTS))], results[3])
    assert all(set(found[f"kept {index}"].outputs[0].weights_versions) == {0, 1} for index in range(len(REQUESTS)))
    assert_same(run(engine, REQUESTS), results[3])


def test_without_a_token_nothing_is_kept(engine, new):
    """A prompt that is half computed starts over: every token it ever gives is one of the new weights alone."""
    prompt = [i % VOCAB for i in range(400)]  # two steps of 256 tokens
    branches = replace(SAMPLED, n=3, max_tokens=5)
    [result], _ = run_with_update(engine, [(prompt, branches)], 1, running="keep")
    assert_same([result], run(new, [(prompt, branches)]))
    assert [output.weights_versions for output in result.outputs] == [[9] * 5] * 3


@pytest.mark.parametrize("running", ["recompute", "keep"])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_is_scored_by_one_version(engine, new, running, max_tokens):
    """Log-probabilities that are there for a part of the prompt only are forgotten with the old weights."""
    prompt = [i % VOCAB for i in range(400)]  # two steps of 256 tokens
    params = replace(SAMPLED, prompt_logprobs=1, max_tokens=max_tokens)
    [result], _ = run_with_update(engine, [(prompt, params)], 1, running=running)
    [want] = run(new, [(prompt, params)])
    assert len(result.prompt_logprobs) == 400
    assert result.prompt_logprobs == want.prompt_logprobs
    assert_same([result], [want])


def test_branches_do_not_start_from_kept_pages(engine, new, monkeypatch):
    """A branch that has no slot yet when the weights change computes the prompt itself."""
    monkeypatch.setattr(engine.scheduler, "_free_slots", engine.scheduler._free_slots[-1:])
    monkeypatch.setattr(engine.scheduler, "max_num_seqs", 1)
    branches = replace(SAMPLED, n=2, max_tokens=5)
    monkeypatch.setattr(engine.scheduler, "check_integrity", lambda: None)
    slots = engine.scheduler._free_slots
    engine.add_request("a", PROMPT, branches)
    engine.step()
    engine.update_params(fresh(3), running="keep")
    slots.append(1)  # now there is room beside the kept branch
    found = None
    while engine.has_unfinished():
        for delta in engine.step():
            found = delta if found is None else (found.extend(delta) or found)
    [want] = run(new, [(PROMPT, branches)])
    assert found.outputs[0].weights_versions == [0] + [1] * 4
    assert found.outputs[1].weights_versions == [1] * 5
    assert part(found.outputs[1], 0) == part(want.outputs[1], 0)


@pytest.mark.parametrize("running", ["recompute", "keep"])
def test_updates_under_lack_of_pages(engine, running):
    """With preemptions before and after, nothing is lost: every request gets all its tokens, versions in order."""
    requests = [(PROMPT[: 5 + 3 * i], replace(SAMPLED, seed=i, max_tokens=30)) for i in range(6)]
    pool = engine.scheduler.pool
    held = pool.allocate(pool.num_free - 10)
    before = engine.stats()["num_preemptions"]
    run_with_update(engine, requests, -1)
    assert engine.stats()["num_preemptions"] > before  # without an update, for lack of pages alone
    found, _ = run_with_update(engine, requests, 20, running=running)
    pool.release(held)
    for result in found:
        versions = result.outputs[0].weights_versions
        assert len(versions) == len(result.outputs[0].token_ids) == 30
        assert versions == sorted(versions)
        assert set(versions) <= {0, 9}
