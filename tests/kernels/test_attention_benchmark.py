"""The benchmark of paged attention: its bytes and operations by hand, and its table where there is no GPU."""

import sys

from jaxserve.kernels_pallas.paged_attention import benchmark
from jaxserve.kernels_pallas.paged_attention.benchmark import Heads, cost
from jaxserve.kernels_pallas.paged_attention.work_list import QueryRun

LLAMA = Heads(kv_heads=8, group=4, head_dim=128)


def test_the_cost_of_a_decode_row():
    """4,096 keys: 4,096 bytes each for Llama-3-8B's layer; queries and results of 8 KiB; 8 splits of 32 heads."""
    of = cost(LLAMA, [QueryRun(0, 4095, 1)], split=512)
    assert of.bytes == 4096 * 4096 + 2 * 8192 + 2 * 8 * 32 * (128 + 32) * 4
    assert of.operations == 4 * 32 * 128 * 4096
    assert of.floor == of.bytes / 4.8e12
    assert cost(LLAMA, [QueryRun(0, 511, 1)], split=512) == cost(LLAMA, [QueryRun(0, 511, 1)])


def test_the_cost_of_a_prompt():
    """Token i sees i + 1 keys; a chunk behind a prefix sees that too."""
    whole = cost(LLAMA, [QueryRun(0, 0, 4096)])
    assert whole.operations == 4 * 32 * 128 * sum(range(1, 4097))
    assert whole.floor == whole.operations / 989e12
    halves = [cost(LLAMA, [QueryRun(0, start, 2048)]) for start in (0, 2048)]
    assert sum(half.operations for half in halves) == whole.operations
    assert sum(half.bytes for half in halves) == whole.bytes + 2048 * 4096  # the first half's keys are read twice


def test_without_a_gpu_the_floors_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--batches", "64", "--contexts", "4096", "--prompts", "512"])
    benchmark.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:22].strip() for line in lines] == [
        "one layer",
        "decode 64 x 4096",
        "verify 16 x 8 at 4096",
        "prefill 512",
    ]
    assert float(lines[1].split()[-1]) == 228.3
