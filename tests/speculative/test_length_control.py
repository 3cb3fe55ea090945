"""The length controller against the arithmetic that it stands for, on steps whose cost and drafts are made up."""

import random
import re

import pytest

from jaxserve.config import SpeculativeConfig
from jaxserve.metrics import Figures, exposition
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative.acceptance import NO_DRAFT, REJECTED
from jaxserve.speculative.length_control import LengthController

BUCKETS = (8, 16, 32, 64, 128, 256, 512)


def requests(count: int, **params) -> list[Request]:
    return [
        Request(
            str(i),
            0,
            [1],
            SamplingParams(**params),
            seed=i,
            arrival=i,
            max_total_tokens=999,
            stop_token_ids=frozenset(),
        )
        for i in range(count)
    ]


def simulate(
    controller: LengthController,
    running: list[Request],
    *,
    row_seconds: float,
    acceptance: float,
    step_seconds: float = 0.05,
    steps: int = 200,
    room: int = 1000,
    available: float = 1.0,
    seed: int = 0,
) -> tuple[float, float]:
    """(tokens a second, mean draft length) of the second half of some steps."""
    source = random.Random(seed)
    total_tokens = total_seconds = total_lengths = 0.0
    for step in range(steps):
        lengths = controller.choose(running, room)
        assert sum(lengths) <= room
        rows = tokens = 0
        for request, length in zip(running, lengths, strict=True):
            exist = length if source.random() < available else 0
            accepted = 0
            while accepted < exist and source.random() < acceptance:
                accepted += 1
            sampled = [5] * (1 + accepted) + [REJECTED] * (exist - accepted) + [NO_DRAFT] * (length - exist)
            assert not length or controller.observe(request, sampled) == 1 + accepted
            rows, tokens = rows + 1 + exist, tokens + 1 + accepted
        seconds = (step_seconds + rows * row_seconds) * source.uniform(0.9, 1.1)
        controller.observe_step(len(running), sum(lengths), rows, seconds)
        if step >= steps // 2:
            total_tokens, total_seconds = total_tokens + tokens, total_seconds + seconds
            total_lengths += sum(lengths) / len(lengths)
    return total_tokens / total_seconds, total_lengths / (steps - steps // 2)


def best_fixed(running: int, row_seconds: float, acceptance: float, step_seconds: float = 0.05) -> float:
    """The rate of the best constant length."""
    rates = []
    for length in (0, 1, 3, 7):
        tokens = running * sum(acceptance**i for i in range(length + 1))
        rates.append(tokens / (step_seconds + running * (1 + length) * row_seconds))
    return max(rates)


@pytest.mark.parametrize("running", [1, 8, 64])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("row_seconds", [0.0, 0.002, 0.01])
def test_it_is_nearly_as_fast_as_the_best_constant_length(running, acceptance, row_seconds):
    controller = LengthController(SpeculativeConfig(method="ngram"), BUCKETS)
    rate, _ = simulate(controller, requests(running), row_seconds=row_seconds, acceptance=acceptance)
    assert rate > 0.9 * best_fixed(running, row_seconds, acceptance)


@pytest.mark.parametrize(("available", "drafts"), [(0.1, 0), (0.9, 1)])
def test_a_larger_bucket_has_to_pay_as_a_whole(available, drafts):
    """A step takes what its bucket takes, whether or not the planned drafts exist. With 16 requests the next bucket
    takes 1.2 times as long, so that it pays where most drafts exist, and not where few do."""
    seconds = dict(zip(BUCKETS, (0.015, 0.028, 0.034, 0.06, 0.1, 0.2, 0.4), strict=True))
    controller, running, source = (
        LengthController(SpeculativeConfig(method="ngram"), BUCKETS),
        requests(16),
        random.Random(0),
    )
    tokens = time = planned_late = 0.0
    for step in range(300):
        lengths = controller.choose(running, 112)
        planned, rows = 16 + sum(lengths), 16
        for request, length in zip(running, lengths, strict=True):
            exist = length if source.random() < available else 0
            accepted = next((i for i in range(exist) if source.random() > 0.6), exist)
            sampled = [5] * (1 + accepted) + [REJECTED] * (exist - accepted) + [NO_DRAFT] * (length - exist)
            rows += exist
            tokens += (controller.observe(request, sampled) if length else 1) if step >= 100 else 0
        took = seconds[next(size for size in BUCKETS if size >= planned)] * source.uniform(0.95, 1.05)
        controller.observe_step(16, sum(lengths), rows, took)
        time += took if step >= 100 else 0
        planned_late += sum(lengths) if step >= 100 else 0
    best = 16 * (1 + available * 0.6) / seconds[32] if drafts else 16 / seconds[16]
    assert tokens / time > 0.95 * best
    assert (planned_late / 200 > 14) == bool(drafts)


def test_chance_alone_does_not_stop_the_drafts_of_short_requests():
    """One in five accepted pays, a row being cheap, but a request sees some forty drafts: five failures are nothing."""
    controller, rates = LengthController(SpeculativeConfig(method="ngram"), BUCKETS), []
    cost = {"row_seconds": 0.0008, "step_seconds": 0.016}
    for seed, request in enumerate(requests(60)):
        rate, _ = simulate(controller, [request], acceptance=0.2, steps=50, seed=seed, **cost)
        rates.append(rate)
    assert sum(rates) / len(rates) > 0.98 * best_fixed(1, acceptance=0.2, **cost)


def test_under_load_it_goes_to_zero_and_comes_back():
    controller = LengthController(SpeculativeConfig(method="ngram"), BUCKETS)
    running = requests(64)
    load = {"row_seconds": 0.01, "acceptance": 0.5}
    _, loaded = simulate(controller, running, **load)
    _, alone = simulate(controller, running[:1], **load)
    _, again = simulate(controller, running, **load)
    assert loaded < 0.2
    assert again < 0.2
    assert alone > 0.7


def test_a_request_whose_drafts_fail_gets_few_beside_one_whose_drafts_hold():
    controller = LengthController(SpeculativeConfig(method="ngram"), BUCKETS)
    good, bad = requests(2)
    drafted = []
    for _ in range(80):
        lengths = controller.choose([good, bad], 100)
        for request, length in zip((good, bad), lengths, strict=True):
            if length:
                controller.observe(request, [5] * (1 + length) if request is good else [5] + [REJECTED] * length)
        controller.observe_step(2, sum(lengths), 2 + sum(lengths), 0.05 + 0.005 * sum(lengths))
        drafted.append(lengths)
    assert all(length == 7 for length, _ in drafted[-20:])
    assert sum(length for _, length in drafted[-20:]) <= 2


def test_where_there_is_little_room_the_surest_drafts_come_first():
    controller = LengthController(SpeculativeConfig(method="ngram"), BUCKETS)
    running = requests(3)
    for request, accepted in zip(running, (0, 7, 3), strict=True):
        for _ in range(5):
            controller.observe(request, [5] * (1 + accepted) + [REJECTED] * (7 - accepted))
    assert controller.choose(running, 9)[1] == 7
    assert sum(controller.choose(running, 9)) <= 9
    assert controller.choose(running, 0) == [0, 0, 0]


def test_a_fixed_length_is_fixed_and_a_request_may_decline():
    controller = LengthController(SpeculativeConfig(method="ngram", num_speculative_tokens=5, length_control="fixed"))
    willing, unwilling = requests(1)[0], requests(1, speculative=False)[0]
    for _ in range(50):
        assert controller.choose([willing, unwilling], 100) == [5, 0]
        controller.observe(willing, [5] + [REJECTED] * 5)
        controller.observe_step(2, 5, 7, 1.0)


def test_the_counts_are_those_of_the_drafts():
    controller = LengthController(SpeculativeConfig(method="ngram", num_speculative_tokens=3))
    (request,) = requests(1)
    controller.observe(request, [5, 6, REJECTED, NO_DRAFT])
    controller.observe(request, [5, 6, 7, 8])
    controller.observe(request, [5, NO_DRAFT, NO_DRAFT, NO_DRAFT])
    stats = controller.stats()
    assert stats["spec_num_drafts"] == 2
    assert stats["spec_num_draft_tokens"] == 5
    assert stats["spec_num_accepted_tokens"] == 4
    assert stats["spec_mean_accepted_length"] == 3.0
    assert [stats[f"spec_num_accepted_tokens_pos_{i}"] for i in range(3)] == [2, 1, 1]


def test_prometheus_reads_the_counts():
    controller = LengthController(SpeculativeConfig(method="ngram", num_speculative_tokens=2))
    controller.observe(requests(1)[0], [5, 6, REJECTED])
    text = exposition(Figures(controller.stats()), "tiny").decode()
    found = dict(re.findall(r"^jaxserve:(spec_\w+)\{.*\} (\S+)$", text, re.MULTILINE))
    assert found == {
        "spec_num_drafts_total": "1.0",
        "spec_num_draft_tokens_total": "2.0",
        "spec_num_accepted_tokens_total": "1.0",
        "spec_num_accepted_tokens_pos_0_total": "1.0",
        "spec_num_accepted_tokens_pos_1_total": "0.0",
        "spec_mean_accepted_length": "2.0",
        "spec_mean_draft_length": "0.0",
    }
