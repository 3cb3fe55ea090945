"""The Hopper kernel, interpreted with race detection: the reference's tokens, bit for bit, and the bytes it reads."""

import functools
import inspect
import sys
import types

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from jaxserve.config import ACCEPTANCE_RULES
from jaxserve.kernels_pallas import hopper, verify_draft
from jaxserve.kernels_pallas.verify_draft import (
    DraftLogits,
    DraftRows,
    choose_verify,
    mosaic,
    noise,
    passes,
    reference,
    sampler,
)
from jaxserve.kernels_pallas.verify_draft.passes import Config
from jaxserve.sampling_params import SamplingParams
from tests.interpreter import watched_races
from tests.kernels.verify_tools import KINDS, make_case, params_of, sampled_drafts
from tests.sampling.helpers import exact_distribution, rows_of

SMALL = Config(tile=256, lanes=128, stages=2)  # many tiles, so that buffers are refilled
SHORT = Config(tile=128, lanes=128, stages=2)
ROWS, VOCAB = len(KINDS), 300  # of most tests, also of the oracle: each shape is a compilation; the last tile overlaps

verify = jax.jit(reference.verify_draft, static_argnames="rule")


@functools.cache
def interpreted(function, config: Config, **static):
    """Compiled once for all tests that call it with the same shapes."""
    return jax.jit(functools.partial(function, config=config, interpret=hopper.interpreted(), **static))


def same_as_reference(case, rule: str, drafter: str, config: Config = SMALL) -> None:
    draft_logits = sampled_drafts(case) if drafter == "sampled" else None
    with watched_races() as races:
        found = interpreted(mosaic.verify_draft, config, rule=rule)(*case.arguments, draft_logits=draft_logits)
        jax.block_until_ready(found)
    assert not races.found()
    expected = verify(*case.arguments, rule=rule, draft_logits=draft_logits)
    assert case.yielded(found) == case.yielded(expected)


def test_every_kind_of_row_gets_the_samplers_token():
    case = make_case(ROWS, 1, VOCAB)
    with watched_races() as races:
        tokens = np.asarray(interpreted(mosaic.sample, SHORT)(case.logits, case.rows, case.positions))
    assert not races.found()
    np.testing.assert_array_equal(tokens, case.samples)


def test_agreement():
    case = make_case(ROWS, 2, VOCAB)
    with watched_races() as races:
        found = jax.block_until_ready(interpreted(mosaic.verify_draft, SHORT)(*case.arguments))
    assert not races.found()
    assert ROWS < sum(map(len, case.yielded(case.samples))) < 2 * ROWS, "all or none accepted"
    np.testing.assert_array_equal(np.asarray(found)[case.drafts.real], case.samples[case.drafts.real])


def test_rejection():
    same_as_reference(make_case(ROWS, 2, VOCAB), "rejection", "certain", SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["certain", "sampled"])
def test_rejection_in_many_tiles(drafter):
    same_as_reference(make_case(5, 2, 600), "rejection", drafter)


shapes = st.fixed_dictionaries(
    {
        "count": st.integers(1, 4),
        "width": st.integers(1, 4),
        "vocab": st.sampled_from([5, 128, 129, 512, 1001, 2050]),
        "spread": st.sampled_from([0.0, 0.3, 3.0, 20.0]),
        "seed": st.integers(0, 2**20),
    }
)
drafters = st.sampled_from(["certain", "sampled"])
configs = st.sampled_from([SMALL, Config(tile=128, lanes=128, stages=3, ways=2), Config(tile=512, lanes=256, stages=2)])


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shape=shapes,
    config=configs,
    rule=st.sampled_from(ACCEPTANCE_RULES),
    drafter=st.sampled_from(["certain", "sampled"]),
)
def test_any_shape(shape, config, rule, drafter):
    same_as_reference(make_case(**shape), rule, drafter, config)


@pytest.mark.slow
@settings(max_examples=2, deadline=None, derandomize=True)
@given(shape=shapes, config=configs)
def test_a_few_shapes(shape, config):
    same_as_reference(make_case(**shape), "agreement", "certain", config)


# The target's and the proposer's probabilities are far apart, so that few draws show what goes wrong. The family of
# chi-square tests fails by chance with probability FAMILY_ALPHA (Bonferroni; seeds are fixed), and misses tokens that
# came from the target where they should have come from what the proposer leaves over with less than 10 %.
TARGET, PROPOSER = np.array([0.47, 0.45, 0.05, 0.03]), np.array([0.5, 0.02, 0.24, 0.24])
NOT_FILTERED, FILTERED = {}, {"temperature": 0.8, "top_k": 3, "top_p": 0.97}
FAMILY_ALPHA, DRAWS = 1e-3, 192


def chance(observed: np.ndarray, p: np.ndarray) -> float:
    """The p-value of counts of tokens; zero if there are some that cannot be."""
    kept = p > 0
    return float(observed[~kept].sum() == 0) * scipy.stats.chisquare(observed[kept], p[kept] * observed.sum()).pvalue


def power(p: np.ndarray, other: np.ndarray, alpha: float) -> float:
    """How probably DRAWS tokens of another distribution are told from those of p."""
    freedom, shift = (p > 0).sum() - 1, DRAWS * ((other - p)[p > 0] ** 2 / p[p > 0]).sum()
    return scipy.stats.ncx2.sf(scipy.stats.chi2.isf(alpha, freedom), freedom, shift)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ACCEPTANCE_RULES)
@pytest.mark.parametrize("given", [NOT_FILTERED, FILTERED], ids=["not filtered", "filtered"])
def test_tokens_are_distributed_as_the_target_says(rule, given):
    """One draft a request, sampled by the proposer: the token at its place, and the one behind it."""
    params = SamplingParams(**given)
    target, proposer = (np.log(p).astype(np.float32) for p in (TARGET, PROPOSER))
    p, q = (exact_distribution(logits, params) for logits in (target, proposer))
    seeds = np.stack([np.arange(DRAWS), np.full(DRAWS, 5)], axis=1).astype(np.uint32)
    rows = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf), DRAWS, axis=0), rows_of([params]))._replace(seed=seeds)
    positions = np.zeros(DRAWS, np.int32)
    drafts = np.asarray(jax.jit(sampler.sample)(np.tile(proposer, (DRAWS, 1)), rows, positions))
    pairs = lambda first, second: np.stack([first, second], axis=1).reshape(-1)
    every = jax.tree.map(lambda leaf: np.repeat(leaf, 2, axis=0), rows)
    runs = DraftRows(pairs(positions, positions + 1), pairs(positions - 1, drafts), np.ones(2 * DRAWS, bool))
    offered = DraftLogits(proposer[None], np.zeros(2 * DRAWS, np.int32)) if rule == "rejection" else None
    call = functools.partial(mosaic.verify_draft, config=SHORT, interpret=hopper.interpreted(detect_races=False))
    arguments = np.tile(target, (2 * DRAWS, 1)), every, pairs(positions, positions + 1), runs
    tokens = np.asarray(jax.jit(call, static_argnames="rule")(*arguments, rule=rule, draft_logits=offered))
    alpha = FAMILY_ALPHA / (2 * len(ACCEPTANCE_RULES) * 2)
    for found in tokens.reshape(DRAWS, 2).T:
        assert chance(np.bincount(found, minlength=len(p)), p) > alpha
    common = np.minimum(p, q)
    assert power(p, common + (1 - common.sum()) * p, alpha) > 0.9
    if rule == "rejection":
        accepted = int((tokens.reshape(DRAWS, 2)[:, 0] == drafts).sum())
        assert scipy.stats.binomtest(accepted, DRAWS, common.sum()).pvalue > alpha


def test_rows_that_are_not_finite_end_and_disturb_no_other():
    case = make_case(ROWS, 1, VOCAB)
    logits = case.logits.copy()
    junk = np.array([np.nan, np.inf, -np.inf, np.nan], np.float32)
    logits[::2, ::3] = junk[:, None]
    logits[4] = -np.inf
    tokens = np.asarray(interpreted(mosaic.sample, SHORT)(logits, case.rows, case.positions))
    np.testing.assert_array_equal(tokens[1::2], case.samples[1::2])
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


def expected_reads(logits: np.ndarray, params: SamplingParams, position: int) -> int:
    """Passes over a row as `mosaic.py` states them, without those that find the k-th distance."""
    if params.temperature == 0:
        return 1
    rows = rows_of([params])
    distances = (logits.max() - logits) / np.float32(params.temperature)
    keys = noise.row_keys(rows.seed, jnp.array([position], jnp.int32))
    race = distances + np.asarray(noise.negative_gumbel(keys, jnp.arange(len(logits), dtype=jnp.int32)[None]))[0]
    reads = 2
    if params.top_k > 0 or params.top_p < 1:
        kept = exact_distribution(logits, params) > 0
        left = exact_distribution(logits, SamplingParams(temperature=params.temperature, min_p=params.min_p)) > 0
        if params.top_k > 0 and params.top_p < 1:  # the k-th distance is known before the race
            left = distances <= np.sort(distances)[params.top_k - 1]
        while True:
            winner = np.where(left, race, np.inf).argmin()
            if distances[winner] == 0:
                break
            reads += 1
            if kept[winner]:
                break
            left = distances < distances[winner]
    return reads


@pytest.fixture
def copies(monkeypatch) -> list:
    """Grows by one with each bulk copy of a tile."""
    made = []
    copy = gpu_callbacks.copy_gmem_to_smem
    monkeypatch.setattr(gpu_callbacks, "copy_gmem_to_smem", lambda **given: (made.append(1), copy(**given))[1])
    return made


def test_bytes_read_are_as_stated(copies):
    vocab = 1024
    rng = np.random.default_rng(4)
    sample = interpreted(mosaic.sample, SMALL)
    for params in params_of(len(KINDS)):
        for spread in (0.1, 2.0):
            logits = (rng.normal(size=(1, vocab)) * spread).astype(np.float32)
            copies.clear()
            jax.block_until_ready(sample(logits, rows_of([params]), np.array([7], np.int32)))
            reads = len(copies) * SMALL.tile / vocab
            least = expected_reads(logits[0], params, 7)
            narrows = params.temperature > 0 and 0 < params.top_k < vocab and params.top_p < 1
            assert least + narrows <= reads <= least + narrows * SMALL.narrowing_passes


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["certain", "sampled"])
def test_bytes_read_by_rejection_are_as_stated(copies, drafter):
    """One draft that stands or not; the row behind it does not exist, the draft's own row is the sampler's."""
    vocab, rng = 512, np.random.default_rng(6)
    interpret = hopper.interpreted(detect_races=False)
    verify_one = jax.jit(functools.partial(mosaic.verify_draft, config=SMALL, interpret=interpret, rule="rejection"))
    behind = SamplingParams(temperature=0)  # of the draft's own row: read once
    outcomes = set()
    for kind in ({}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.9, "min_p": 0.001}):
        params = SamplingParams(seed=3, **kind)
        logits = rng.normal(size=(2, vocab)).astype(np.float32)
        logits[0, 5] += 8
        for draft in (int(logits[0].argmax()), int(logits[0].argmin())):  # the other has no place in the filters
            runs = DraftRows(np.arange(2, dtype=np.int32), np.array([-1, draft], np.int32), np.ones(2, bool))
            proposed = logits[:1] * np.float32(0.8) if drafter == "sampled" else None  # more even than the target
            offered = None if proposed is None else DraftLogits(proposed, np.zeros(2, np.int32))
            copies.clear()
            arguments = logits, rows_of([params, behind]), np.array([7, 8], np.int32), runs
            token = int(np.asarray(verify_one(*arguments, draft_logits=offered))[0])
            reads = len(copies) * SMALL.tile / vocab - 1
            if params.temperature == 0:
                assert reads == 1
                continue
            rows = 2 if drafter == "sampled" else 1
            least = rows * (2 + (params.top_p < 1) + (token != draft))
            searches = rows * ((params.top_k > 0) + (params.top_p < 1))
            assert least + searches <= reads <= least + searches * SMALL.narrowing_passes
            outcomes.add(token == draft)
    assert outcomes == {True, False}


def test_log1p_is_accurate():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)
    bits = np.concatenate([bits, 2 ** np.arange(32, dtype=np.uint32), np.uint32([2**32 - 1])])  # the ends, too
    uniform = noise.uniform(jnp.asarray(bits))
    exact = np.log1p(-np.asarray(uniform, np.float64))
    found = np.asarray(jax.jit(passes.log1p)(-uniform), np.float64)
    assert np.abs(found / exact - 1).max() < 4 * 2.0**-24


def test_the_compiled_arithmetic_gives_the_same_tokens_but_for_ties():
    """The GPU's log1p changes the noise in its last bits: of thousands of races none should come out otherwise."""
    uniform = noise.uniform(jnp.asarray(np.random.default_rng(1).integers(0, 2**32, (500, 4096), np.uint32)))
    distances = np.random.default_rng(2).exponential(size=(500, 4096)).astype(np.float32)
    winners = [
        np.asarray(jax.jit(lambda u, f=f: jnp.argmin(distances + jnp.log(-f(-u)), axis=1))(uniform))
        for f in (jnp.log1p, passes.log1p)
    ]
    np.testing.assert_array_equal(*winners)


REFILL = "            pl.when(index + stages < tiles)(lambda: load(index + stages, slot))\n"
READ = "            carry = lax.fori_loop(jnp.int32(0), jnp.int32(tile // lanes), part, carry)\n"
COMMIT = "            plgpu.commit_smem()\n"
MUTANTS = {
    "no wait": (
        "            for source in sources:\n                plgpu.barrier_wait(source.ready.at[slot])\n",
        "",
    ),
    "wait for another buffer": ("barrier_wait(source.ready.at[slot])", "barrier_wait(source.ready.at[0])"),
    "no commit before a buffer is refilled": (COMMIT, ""),
    "refilled before it is read": (READ + COMMIT + REFILL, REFILL + READ + COMMIT),
    "counts twice what two tiles share": ("ids >= index * tile", "ids >= 0"),
    "another tile": ("source.start + first(index)", "source.start + first(index ^ 1)"),
}


def swept(logits: np.ndarray) -> np.ndarray:
    """For each row its likeliest token and its number of positive values, in a kernel that does nothing else."""
    values, config = mosaic.flatten(jnp.asarray(logits), SMALL)
    rows, vocab = logits.shape
    walk = passes.Passes(vocab, len(values) // rows, config, True)

    def program(values, found, ring, ready):
        row = lax.axis_index("row")
        source = passes.Source(values, ring, ready, row * walk.width)
        positive = lambda count, ids, fresh, values: count + (fresh & (values > 0)).astype(jnp.int32)
        found[row, 0] = walk.largest(source)[0]
        found[row, 1] = passes.total(walk.sweep(positive, walk.filled(0, jnp.int32), source))

    return np.asarray(
        plgpu.kernel(
            program,
            out_type=jax.ShapeDtypeStruct((rows, 2), jnp.int32),
            grid=(rows,),
            grid_names=("row",),
            scratch_types=[
                plgpu.SMEM((config.stages, config.tile), jnp.float32),
                plgpu.Barrier(num_barriers=config.stages),
            ],
            interpret=hopper.interpreted(),
        )(values)
    )


def sweeps_are_right() -> bool:
    """Over tiles that refill their buffers, the last of which overlaps the one before."""
    logits = np.random.default_rng(5).normal(size=(2, 1300)).astype(np.float32)
    expected = np.stack([logits.argmax(1), (logits > 0).sum(1)], axis=1)
    with watched_races() as races:
        found = swept(logits)
    return not races.found() and bool((found == expected).all())


def samples_are_right() -> bool:
    kinds, shared = [{"top_k": 8, "top_p": 0.99}, {"top_k": 6}, {"top_k": 4}], slice(1044, 1280)
    case = make_case(6, 1, 1300, spread=0.1, kinds=kinds, raised=shared)
    call = jax.jit(functools.partial(mosaic.sample, config=SMALL, interpret=hopper.interpreted()))
    with watched_races() as races:
        tokens = np.asarray(call(case.logits, case.rows, case.positions))
    return not races.found() and bool((tokens == case.samples).all())


def is_caught(monkeypatch, name: str, is_right) -> bool:
    old, new = MUTANTS[name]
    source = inspect.getsource(passes)
    assert source.count(old) == 1
    mutant = types.ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", mutant)  # dataclasses look there
    exec(compile(source.replace(old, new), "mutant.py", "exec"), mutant.__dict__)
    monkeypatch.setattr(passes.Passes, "sweep", mutant.Passes.sweep)
    try:
        return not is_right()
    except jax.errors.JaxRuntimeError:  # from the interpreter, of a barrier (JAX 0.12 does not say so)
        return True


def test_without_a_bug_a_sweep_is_right():
    assert sweeps_are_right()


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_caught(monkeypatch, name):
    assert is_caught(monkeypatch, name, sweeps_are_right)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_caught_by_what_is_sampled(monkeypatch, name):
    assert is_caught(monkeypatch, name, samples_are_right)


def test_choosing_a_backend(monkeypatch):
    assert choose_verify().name == "reference"
    assert choose_verify("reference").verify_draft is reference.verify_draft
    with pytest.raises(ValueError, match=r"verify_backend='mosaic'.*compute capability 9.0"):
        choose_verify("mosaic")
    monkeypatch.setattr(verify_draft, "why_no_hopper", lambda device: None)
    assert choose_verify().name == choose_verify("mosaic").name == "mosaic"
    assert choose_verify("reference").name == "reference"
    mesh = jax.make_mesh((1,), ("model",))
    assert choose_verify(mesh=mesh).name == "reference"
