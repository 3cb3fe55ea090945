"""The scheduler against a simulated device whose pages show every wrong read."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from simulated_device import EOS, VOCAB, RandomDrafts, Simulation
from watched_scheduler import WatchedScheduler, policies

from jaxserve.request import RequestState
from jaxserve.scheduler.scheduler import Scheduler

token_lists = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=20)


@st.composite
def workloads(draw):
    """(simulation options, actions): requests arrive and are aborted, weights are replaced between steps."""
    options = {
        "num_pages": draw(st.integers(8, 24)),
        "page_size": draw(st.sampled_from([1, 2, 4])),
        "num_slots": draw(st.integers(1, 6)),
        "budget": draw(st.integers(8, 40)),
        "overlap": draw(st.booleans()),
        "caching": draw(st.booleans()),
        "scheduler_class": WatchedScheduler,
    }
    if draw(st.booleans()):
        options["drafts"] = RandomDrafts(draw(st.integers(0, 2**32)), draw(st.integers(1, 9)))
    options["policy"] = policies(options["num_slots"])[draw(st.integers(0, 4))]
    longest = options["num_pages"] * options["page_size"] - 1
    request = st.tuples(
        token_lists.map(lambda ids: ids[:longest]), st.integers(1, 30), st.integers(1, 3), st.integers(-1, 2)
    )
    update = st.sampled_from(["recompute", "keep"])
    action = st.one_of(request, st.just("step"), st.just("step"), st.integers(0, 40), update)
    return options, draw(st.lists(action, min_size=1, max_size=40))


@settings(max_examples=400, deadline=None)
@given(workloads())
def test_any_workload_finishes_with_the_tokens_its_history_demands(workload):
    options, actions = workload
    simulation = Simulation(**options)
    simulation.clock = lambda: float(simulation.steps)
    aborted = set()
    for action in actions:
        if action == "step":
            simulation.step()
        elif action in ("recompute", "keep"):
            simulation.replace_weights(recompute=action == "recompute")
        elif isinstance(action, int):
            alive = [r for r in simulation.requests if r.state is not RequestState.FINISHED]
            if alive:
                aborted.add(alive[action % len(alive)])
                simulation.scheduler.finish(alive[action % len(alive)])
        else:
            prompt, max_tokens, n, priority = action
            simulation.add(prompt, max_tokens, n=n, priority=priority, tenant=f"{priority % 2}")
    simulation.run()
    simulation.check_outputs(aborted)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_random_chunks_change_nothing(seed, overlap):
    import random

    source = random.Random(seed)

    class RandomChunks(Scheduler):
        def chunk_limit(self, request):
            return source.randint(1, request.num_to_compute)

    simulation = Simulation(num_pages=40, budget=32, overlap=overlap, scheduler_class=RandomChunks)
    for _ in range(6):
        simulation.add([source.randrange(VOCAB - 1) for _ in range(source.randint(1, 40))], source.randint(1, 20))
    simulation.run()
    simulation.check_outputs()


def test_a_planted_bug_is_seen():
    """The simulation must be able to fail: without copy on write, branches overwrite each other."""

    class NoCopies(Scheduler):
        def _own_pages(self, plan, request, num_tokens):
            done = super()._own_pages(plan, request, num_tokens)
            plan.copies.clear()
            return done

    simulation = Simulation(scheduler_class=NoCopies, num_pages=40)
    for _ in range(20):
        simulation.add([1, 2, 3, 4, 5], 12, n=3, eos=False)
    with pytest.raises(AssertionError, match="wrong keys and values"):
        simulation.run()


def test_branches_share_full_pages_and_copy_the_partial_one():
    simulation = Simulation(num_pages=40, page_size=4, num_slots=8, budget=64, overlap=False, caching=False)
    branches = simulation.add([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], 8, n=4, eos=False)
    simulation.step()  # the prompt, by the first branch
    assert [len(branch.pages) for branch in branches] == [3, 0, 0, 0]
    plan = simulation.step()
    assert sum(entry.count for entry in plan.entries) == 4, "a branch recomputes one token of the prompt, no more"
    running = [branch for branch in branches if branch.state is RequestState.RUNNING]
    assert len({tuple(branch.pages[:2]) for branch in running}) == 1
    simulation.run()
    simulation.check_outputs()
    assert simulation.scheduler.stats.prefix_cache_hits == 0


def test_a_cached_prompt_computes_its_last_token_only():
    simulation = Simulation(num_pages=16, page_size=4, overlap=False)
    prompt = [1, 2, 3, 4, 5, 1, 2, 3]
    simulation.add(prompt, 1)
    simulation.run()
    (again,) = simulation.add(prompt, 1)
    plan = simulation.step()
    assert [(entry.start, entry.count) for entry in plan.entries] == [(7, 1)]
    assert again.num_cached_tokens == 7
    assert simulation.scheduler.stats.prefix_cache_hits == 7


def test_a_page_of_two_versions_of_the_weights_is_nobodys_prefix():
    simulation = Simulation(num_pages=16, page_size=4, overlap=False)
    (kept,) = simulation.add([1, 2, 3], 9, eos=False)
    simulation.step()
    simulation.replace_weights(recompute=False)
    for _ in range(3):
        simulation.step()  # fills the first page, whose first three places hold the old version's
    (other,) = simulation.add(kept.token_ids[:5], 3, eos=False)
    simulation.run()
    assert other.num_cached_tokens == 0
    simulation.check_outputs()


def test_the_oldest_request_is_never_preempted_and_nobody_thrashes():
    simulation = Simulation(num_pages=9, page_size=2, num_slots=4, budget=16)
    requests = [simulation.add([i % 6, 1, 2, 3], 13)[0] for i in range(4)]
    resumed_at: dict[object, int] = {}
    admissions = dict.fromkeys(requests, 0)
    while simulation.scheduler.has_unfinished():
        oldest = next(r for r in requests if r.state is not RequestState.FINISHED)
        before = {r for r in requests if r.state is RequestState.RUNNING}
        simulation.step()
        assert oldest.num_admissions <= admissions[oldest] + 1
        for request in requests:
            if request.num_admissions > admissions[request]:
                admissions[request] = request.num_admissions
                resumed_at[request] = simulation.steps
            if request in before and request.state in (RequestState.WAITING, RequestState.PREEMPTED):
                assert request is not oldest, "the oldest request lost its pages"
                assert simulation.steps > resumed_at[request] + 1, "resumed only to be preempted in the next step"
    assert simulation.scheduler.stats.num_preemptions > 0, "the pool was not small enough for this test"
    simulation.check_outputs()


def test_a_long_prompt_does_not_starve_behind_short_ones():
    simulation = Simulation(num_pages=30, page_size=2, num_slots=3, budget=8)
    for _ in range(3):
        simulation.add([1, 2], 10)
    (long,) = simulation.add([1] * 40, 4)
    while long.state is not RequestState.FINISHED:
        simulation.add([2, 3], 3)  # an endless stream of newcomers
        simulation.step()
        assert simulation.steps < 200


def test_budgets_are_filled_exactly_while_prompts_wait():
    simulation = Simulation(num_pages=200, page_size=4, num_slots=8, budget=64)
    for i in range(8):
        simulation.add([i % 6, i // 6] * 25, 4, eos=False)
    plans = [simulation.step() for _ in range(6)]
    assert [plan.num_tokens for plan in plans] == [64] * 6


def test_a_result_that_is_not_finite_ends_its_request_and_frees_its_pages_without_a_trace():
    simulation = Simulation(num_pages=16, page_size=4, overlap=False)
    (bad,) = simulation.add([1, 2, 3, 4, 5, 1, 2, 3], 4)
    (good,) = simulation.add([5, 4, 3, 2], 4)
    plan = simulation.scheduler.schedule()
    tokens = simulation.device.run(plan)
    for entry, token in zip(plan.entries, tokens, strict=True):
        simulation.scheduler.complete(entry, token, finite=entry.request is good)
    assert bad.finish_reason == "error"
    assert "not finite" in bad.error
    (again,) = simulation.add([1, 2, 3, 4, 5, 1, 2, 3], 4)
    simulation.run()
    assert again.num_cached_tokens == 0, "pages of a failed request were reused"
    simulation.requests.remove(bad)
    simulation.check_outputs()


def test_a_stop_token_ends_a_request_one_step_late_and_its_extra_token_is_dropped():
    simulation = Simulation(num_pages=60, budget=32)
    requests = [simulation.add([i % 6, i // 6], 30)[0] for i in range(30)]
    simulation.run()
    simulation.check_outputs()
    assert any(request.output_token_ids[-1] == EOS for request in requests)
