"""What is taken for the time of a step: by a clock of its own, and in an engine."""

import pytest
from engine_tools import run, tiny_engine

from jaxserve import SamplingParams
from jaxserve.speculative.step_timer import StepTimer


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but where a test moves it on."""
    now = [100.0]
    for module in ("jaxserve.speculative.step_timer", "jaxserve.engine"):
        monkeypatch.setattr(f"{module}.perf_counter", lambda: now[0])
    return now


def test_a_step_runs_from_its_dispatch_or_the_end_of_the_one_before(clock):
    timer = StepTimer()
    timer.enter()
    first = clock[0]
    clock[0] += 1
    second = clock[0]  # dispatched while the first runs
    clock[0] += 2
    assert timer.arrived(first) == 3
    timer.leave()
    clock[0] += 0.5  # the caller does little in between
    timer.enter()
    clock[0] += 4
    assert timer.arrived(second) == 4.5


def test_one_that_nobody_waited_for_tells_nothing(clock):
    timer = StepTimer()
    timer.enter()
    dispatched = clock[0]
    timer.leave()
    clock[0] += 60
    timer.enter()
    clock[0] += 1
    assert timer.arrived(dispatched) is None


def test_pauses_and_compilations_are_not_the_cost_of_a_step(clock, monkeypatch):
    """Every step takes a second, a compilation 50, and the engine rests for 500 between two pieces of work."""
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with tiny_engine(speculative_config=speculation, max_num_batched_tokens=16, max_num_seqs=4) as engine:
        runner, seen, observe = engine.runner, [], engine._drafts.observe_step
        compile_all, sample = runner.compiler.get_all, runner.sample

        def compiled(programs):
            clock[0] += 0 if all(map(runner.compiler.has, programs)) else 50
            compile_all(programs)

        def sampled(*step, **options):
            clock[0] += 1
            return sample(*step, **options)

        monkeypatch.setattr(engine._drafts, "observe_step", lambda *step: (seen.append(step[-1]), observe(*step)))
        monkeypatch.setattr(runner.compiler, "get_all", compiled)
        monkeypatch.setattr(runner, "sample", sampled)
        for _ in range(3):
            run(engine, [([5, 6, 5, 6, 5], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))])
            assert engine._in_flight is not None, "a step lies there until there is more work"
            clock[0] += 500
        assert len(seen) > 6
        assert max(seen) <= 2
