"""The benchmark of host work: its device answers at once, everything else is the real engine."""

from jaxserve import SamplingParams
from jaxserve.bench import host_work
from jaxserve.bench.workload import trace


def test_the_instant_device_lets_an_engine_run_to_its_end():
    with host_work.instant_engine(4, 64) as engine:
        for index, item in enumerate(trace(6, vocab=512)):
            params = SamplingParams(temperature=0, max_tokens=min(item.output, 20), ignore_eos=True, n=1 + index % 2)
            engine.add_request(str(index), item.prompt, params)
        tokens: dict[tuple[str, int], list[int]] = {}
        while engine.has_unfinished():
            for delta in engine.step():
                for output in delta.outputs:
                    tokens.setdefault((delta.request_id, output.index), []).extend(output.token_ids)
        engine.check_integrity()
        assert {key: set(ids) for key, ids in tokens.items()} == {key: {1} for key in tokens}
        expected = {(str(i), b): min(item.output, 20) for i, item in enumerate(trace(6)) for b in range(1 + i % 2)}
        assert {key: len(ids) for key, ids in tokens.items()} == expected
        assert engine.stats()["compilations"] == 0


def test_all_parts_are_measured():
    found = host_work.decode_steps(3, steps=4)
    assert set(found) == {"step", *host_work.PARTS}
    assert 0 < sum(found[part] for part in host_work.PARTS) < 2 * found["step"]
    assert host_work.prefix_cache_us(3, steps=20) > 0
