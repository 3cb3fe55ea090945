"""Fair shares between tenants, against the bound of the paper (arXiv 2401.00588, theorem 4.4) and by definition."""

import random
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from simulated_device import VOCAB, Simulation

from jaxserve.request import RequestState
from jaxserve.scheduler.policies import Fair, FirstComeFirstServed, make_policy


class Service:
    """What each tenant has got: 1 for a position of a prompt, 2 for an output's, each counted once."""

    def __init__(self):
        self.got = {}
        self._highest = {}

    def count(self, plan):
        for entry in plan.entries:
            request = entry.request
            for position in range(max(entry.start, self._highest.get(request, 0)), entry.start + entry.count):
                weight = 1 if position < request.num_prompt_tokens else 2
                self.got[request.tenant] = self.got.get(request.tenant, 0) + weight
            self._highest[request] = max(self._highest.get(request, 0), entry.start + entry.count)


def simulation(policy=None, **options):
    return Simulation(policy=policy or Fair(), caching=False, **options)


def prompt(source, length):
    return [source.randrange(VOCAB - 1) for _ in range(length)]


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(8, 40), st.booleans(), st.integers(14, 60))
def test_who_always_has_work_gets_an_equal_share(seed, slots, budget, overlap, pages):
    """Tenants of quite different requests, all with a queue that never ends: shares differ by less than the bound."""
    source = random.Random(seed)
    simulated = simulation(num_slots=slots, budget=budget, overlap=overlap, num_pages=pages, page_size=4)
    longest = {"a": (12, 3), "b": (3, 20), "c": (20, 12)}  # prompt, output
    service, shares = Service(), []
    for _ in range(200):
        for tenant, (most, output) in longest.items():
            while sum(request.tenant == tenant for request in simulated.scheduler.waiting) < 3:
                length = source.randint(1, most)
                simulated.add(prompt(source, length), source.randint(1, output), tenant=tenant, eos=False)
        service.count(simulated.step())
        shares.append([service.got.get(tenant, 0) for tenant in longest])
    batch = 2 * min(slots * 32, pages * 4)  # the most that running requests can still get: w_q M
    bound = 2 * max(20, batch)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        differences = [share[first] - share[second] for share in shares]
        assert max(differences) - min(differences) <= bound
    assert min(shares[-1]) > 0


def flooded(policy):
    """Steps from the arrival of one small request, in the middle of another tenant's flood, to its end."""
    source = random.Random(1)
    simulated = simulation(policy, num_slots=4, budget=32, num_pages=60)
    for _ in range(80):
        simulated.add(prompt(source, 10), 20, tenant="flood", eos=False)
    for _ in range(50):
        simulated.step()
    [small] = simulated.add(prompt(source, 10), 20, tenant="small", eos=False)
    begun = simulated.steps
    while small.state is not RequestState.FINISHED:
        simulated.step()
    taken = simulated.steps - begun
    simulated.run(10_000)
    simulated.check_outputs()
    return taken


def test_a_flood_starves_nobody():
    """The small one waits for a slot (20 steps at most) and then runs (22); by arrival it would wait for the flood."""
    assert flooded(Fair()) <= 45
    assert flooded(FirstComeFirstServed()) > 200


def test_who_was_away_does_not_save_up():
    source = random.Random(2)
    simulated = simulation(num_slots=2, budget=16, num_pages=40)
    service = Service()
    for _ in range(30):
        simulated.add(prompt(source, 8), 8, tenant="busy", eos=False)
    for _ in range(100):
        service.count(simulated.step())
    for _ in range(30):
        simulated.add(prompt(source, 8), 8, tenant="late", eos=False)
    before = service.got["busy"]
    for _ in range(60):
        service.count(simulated.step())
    assert service.got["busy"] - before > 0.35 * (service.got["busy"] - before + service.got["late"])


def test_a_priority_counts_within_a_tenant_only():
    simulated = simulation(num_slots=1, budget=16, num_pages=40, overlap=False)
    add = lambda tenant, priority: simulated.add([1, 2, 3, 4], 4, tenant=tenant, priority=priority, eos=False)[0]
    greedy = [add("a", -100 - index) for index in range(3)]
    modest = [add("b", 5), add("b", 1)]
    order = []
    while simulated.scheduler.has_unfinished():
        simulated.step()
        order += [r for r in simulated.requests if r.state is RequestState.FINISHED and r not in order]
    assert order == [greedy[2], modest[1], greedy[1], modest[0], greedy[0]]


def test_nothing_is_remembered_of_tenants_that_are_gone():
    simulated = simulation(num_slots=4, budget=32, num_pages=60)
    for index in range(50):
        simulated.add([1, 2, 3], 3, tenant=f"tenant {index}", eos=False)
        simulated.step()
    simulated.run()
    assert simulated.scheduler.policy._counters == {}
    assert not simulated.scheduler.policy._unfinished


def test_what_the_prefix_cache_knows_costs_nothing():
    simulated = Simulation(policy=Fair(), num_slots=2, num_pages=40, overlap=False)
    simulated.add([5] * 4, 40, tenant="other", eos=False)  # while it runs, counters are kept
    spent = lambda: simulated.scheduler.policy._counters.get("a", 0)
    costs = []
    for _ in range(2):
        before = spent()
        [request] = simulated.add([1, 2, 3, 4] * 5, 1, tenant="a", eos=False)
        begun = spent()  # lifted to what the other has
        highest = begun
        while request.state is not RequestState.FINISHED:
            simulated.step()
            highest = max(highest, spent())  # forgotten when the tenant is gone and has no more than the other
        assert begun >= before
        costs.append(highest - begun)
    assert costs == [20, 1]


def test_the_option_makes_it():
    assert type(make_policy("fair", max_num_seqs=2)) is Fair
