"""Who goes first, and in whose place. The fuzz of test_scheduler.py runs under every policy too."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulated_device import Simulation
from watched_scheduler import WatchedScheduler

from jaxserve.request import RequestState
from jaxserve.scheduler.policies import FirstComeFirstServed, Priority, StaticBatches, make_policy

RUNNING, FINISHED = RequestState.RUNNING, RequestState.FINISHED


def simulation(policy, **options):
    made = Simulation(policy=policy, scheduler_class=WatchedScheduler, **{"num_slots": 1, "page_size": 2, **options})
    made.clock = lambda: float(made.steps)
    return made


def add(simulated, priority=0, prompt=(1, 2), max_tokens=6):
    return simulated.add(list(prompt), max_tokens, priority=priority, eos=False)[0]


def finished_in_order(simulated):
    order = []
    while simulated.scheduler.has_unfinished():
        simulated.step()
        order += [r for r in simulated.requests if r.state is FINISHED and r not in order]
    simulated.check_outputs()
    return order


@pytest.mark.parametrize("overlap", [True, False])
def test_lower_numbers_go_first_and_equal_ones_by_arrival(overlap):
    simulated = simulation(Priority(), overlap=overlap)
    requests = [add(simulated, priority) for priority in (2, 0, 1, 0, -3, 2, 1)]
    assert finished_in_order(simulated) == [requests[i] for i in (4, 1, 3, 2, 6, 0, 5)]
    assert simulated.scheduler.stats.num_preemptions == 0


def test_arrival_alone_counts_without_the_policy():
    simulated = simulation(FirstComeFirstServed())
    requests = [add(simulated, priority) for priority in (2, 0, 1, 0)]
    assert finished_in_order(simulated) == requests


@pytest.mark.parametrize("overlap", [True, False])
def test_a_better_request_takes_the_slot_of_a_running_one_whose_output_stays_the_same(overlap):
    simulated = simulation(Priority(), overlap=overlap, num_slots=2)
    requests = [add(simulated, 3), add(simulated, 2)]
    for _ in range(3):
        simulated.step()
    requests.append(add(simulated, 1, max_tokens=4))
    simulated.step()
    assert [request.state is RUNNING for request in requests] == [False, True, True], "the worst one makes room"
    assert finished_in_order(simulated) == [requests[i] for i in (1, 2, 0)]
    assert simulated.scheduler.stats.num_preemptions == 1


def test_an_equal_request_waits():
    simulated = simulation(Priority())
    first = add(simulated, 1)
    simulated.step()
    add(simulated, 1)
    simulated.step()
    assert first.state is RUNNING
    assert finished_in_order(simulated)[0] is first
    assert simulated.scheduler.stats.num_preemptions == 0


def test_a_better_request_takes_the_pages_it_needs_and_no_more():
    simulated = simulation(Priority(), num_pages=16, num_slots=8, caching=False, budget=32)
    low = [add(simulated, 5 + i, [i] * 6, max_tokens=3) for i in range(4)]  # 3 pages each, 4 with the output
    simulated.step()
    high = add(simulated, 0, [1, 2, 3, 4] * 3)  # 6 pages, and one in reserve for each that runs
    simulated.step()
    assert high.state is RUNNING
    # 16 pages: 6 for it, 3 each for those that stay, 1 in reserve for each: 6 + 2 * 3 + 3 = 15, with three 19.
    assert [request.state is RUNNING for request in low] == [True, True, False, False]
    finished_in_order(simulated)


def test_nobody_is_preempted_where_that_would_not_help():
    simulated = simulation(Priority(), num_pages=12, num_slots=8, caching=False, budget=40)
    best = add(simulated, 0, [1] * 10, max_tokens=12)  # 5 pages, in the end 11
    low = add(simulated, 2, [2] * 4, max_tokens=3)
    simulated.step()
    large = add(simulated, 1, [3] * 20)  # 10 pages: not before the best one has ended
    simulated.step()
    assert (best.state, low.state, large.state) == (RUNNING, RUNNING, RequestState.WAITING)
    assert simulated.scheduler.stats.num_preemptions == 0
    finished_in_order(simulated)


def test_a_better_prompt_does_not_wait_for_the_chunks_of_a_worse_one():
    simulated = simulation(Priority(), num_pages=64, num_slots=4, budget=8)
    long = add(simulated, 1, [1] * 60)
    simulated.step()
    short = add(simulated, 0, [2] * 6)
    plan = simulated.step()
    assert [(entry.request is short, entry.count) for entry in plan.entries] == [(True, 6), (False, 2)]
    assert long.state is RUNNING
    finished_in_order(simulated)


def test_a_better_request_does_not_wait_for_tokens_that_all_go_to_worse_ones():
    simulated = simulation(Priority(), num_pages=64, num_slots=16, budget=8)
    for index in range(8):
        add(simulated, 1, [index % 6], max_tokens=20)
    simulated.step()
    best = add(simulated, 0)
    simulated.step()
    assert best.state is RUNNING
    finished_in_order(simulated)


def served_while_better_ones_keep_coming(policy, steps=150):
    """The step in which a request of priority 3 ends while one of priority 0 arrives every second step, or None."""
    simulated = simulation(policy)
    low = add(simulated, 3)
    for _ in range(steps):
        add(simulated, 0)
        simulated.step()
        simulated.step()
        if low.state is FINISHED:
            return simulated.steps
    return None


def test_ageing_ends_starvation_when_it_says():
    assert served_while_better_ones_keep_coming(Priority()) is None
    # It goes before those of priority 0 that arrive 3 * 8 s later, one step being a second; those in front of it,
    # 12 requests of 6 tokens, come first.
    ended = served_while_better_ones_keep_coming(Priority(aging_s=8.0))
    assert 24 <= ended <= 12 * (6 + 3) + 9


def test_age_alone_takes_nobodys_place():
    simulated = simulation(Priority(aging_s=1.0))
    low = add(simulated, 3)
    simulated.step()
    assert low.state is RUNNING
    for _ in range(3):
        simulated.step()
    better = add(simulated, 0)  # 4 s younger: the low one counts as -1 now
    simulated.step()
    assert (low.state, better.state) == (RUNNING, RequestState.WAITING)
    finished_in_order(simulated)


@pytest.mark.parametrize("overlap", [True, False])
def test_static_batches_run_to_their_end(overlap):
    simulated = simulation(StaticBatches(3), num_pages=64, num_slots=3, overlap=overlap)
    requests = [add(simulated, max_tokens=length) for length in (2, 9, 4, 3, 7, 5, 1)]
    batches = [set(requests[:3]), set(requests[3:6]), set(requests[6:])]
    seen = []
    while simulated.scheduler.has_unfinished():
        alive = {entry.request for entry in simulated.step().entries}
        assert any(alive <= batch for batch in batches)
        seen += [batch for batch in batches if alive & batch and batch not in seen]
    assert seen == batches
    simulated.check_outputs()


def test_a_static_batch_is_closed_to_those_who_come_later_and_open_to_its_own_preempted_ones():
    simulated = simulation(StaticBatches(4), num_pages=8, num_slots=4, caching=False, budget=16)
    first = [add(simulated, max_tokens=10) for _ in range(2)]  # 6 pages each in the end: one has to go
    simulated.step()
    late = add(simulated)
    while any(request.state is not FINISHED for request in first):
        assert late.state is RequestState.WAITING
        simulated.step()
    assert simulated.scheduler.stats.num_preemptions > 0
    assert finished_in_order(simulated)[-1] is late


def test_a_planted_fault_is_seen():
    class Patient(WatchedScheduler):
        def _admit_who_outranks(self, plan):
            pass

    class LastFirst(Priority):
        def order(self, request):
            return -request.priority, request.arrival

    patient = Simulation(num_slots=1, policy=Priority(), scheduler_class=Patient)
    add(patient, 1)
    patient.step()
    add(patient, 0)
    with pytest.raises(AssertionError, match="waits behind running ones that it outranks"):
        patient.step()
    overtaking = simulation(LastFirst())
    add(overtaking, 0)
    add(overtaking, 1)
    with pytest.raises(AssertionError, match="somebody was overtaken"):
        overtaking.step()


def test_options_make_policies():
    aging = make_policy("priority", max_num_seqs=2, priority_aging_s=3.0)
    assert (type(aging), aging.aging_s) == (Priority, 3.0)
    assert type(make_policy("fcfs", max_num_seqs=2)) is FirstComeFirstServed
    assert type(make_policy("static", max_num_seqs=2)) is StaticBatches
