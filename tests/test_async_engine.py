"""The front door for asyncio: the same results as the engine alone, whoever comes, goes, errs or is slow."""

import asyncio
import gc
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from checkpoint_tools import GOLDEN, SHAPES, byte_tokenizer, write_tiny_checkpoint
from engine_tools import assert_same, requests_for, run, tiny_decoder, tiny_engine

from jaxserve import AsyncEngine, Engine, EngineConfig, EngineDeadError, SamplingParams
from jaxserve.runner import determinism

VOCAB = 300
PROMPT = list(range(20, 40))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=480, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def trusted():
    """Other tests test this machine for determinism."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(determinism, "row_invariance", lambda *_: None)
        yield


def new_engine() -> Engine:
    return tiny_engine("float32", text=byte_tokenizer(VOCAB))


@pytest.fixture(scope="module")
def shared():
    with_engine = new_engine()
    front = AsyncEngine(engine=with_engine)
    yield front
    front.close()


@pytest.fixture
def front(shared):
    """The shared one; after every test it must become idle and whole by itself, and hold nothing."""
    yield shared
    asyncio.run(idle(shared))


async def idle(front):
    while (stats := await front.stats())["num_requests_running"] or stats["num_requests_waiting"]:
        await asyncio.sleep(0.005)
    assert stats["kv_cache_usage_perc"] == 0
    await front.check_integrity()
    assert front._mailboxes._open == {}
    assert front._mailboxes._by_id == {}


async def collected(front, prompt, params=GREEDY, **options):
    """All outputs of a request as one."""
    whole = None
    async for output in front.generate(prompt, params, **options):
        if whole is None:
            whole = output
        else:
            whole.extend(output)
    return whole


async def together(front, requests):
    return await asyncio.gather(*(collected(front, prompt, params) for prompt, params in requests))


REQUESTS = requests_for(VOCAB, 24, longest=100, max_tokens=12)


@pytest.fixture(scope="module")
def expected():
    with new_engine() as engine:
        return run(engine, REQUESTS)


def test_many_tasks_get_what_the_engine_gives(front, expected):
    results = asyncio.run(together(front, REQUESTS))
    assert_same(results, expected)
    assert [result.prompt_token_ids for result in results] == [prompt for prompt, _ in REQUESTS]
    assert all(result.finished for result in results)


def test_several_event_loops_at_once(front, expected):
    results = {}

    def one_loop(part):
        results[part] = asyncio.run(together(front, REQUESTS[part::3]))

    threads = [threading.Thread(target=one_loop, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for part in range(3):
        assert_same(results[part], expected[part::3])


def test_outputs_are_deltas_with_id_prompt_and_text(front):
    async def main():
        return [output async for output in front.generate("Hello there", GREEDY, request_id="mine")]

    outputs = asyncio.run(main())
    with new_engine() as engine:
        [want] = run(engine, [("Hello there", GREEDY)])
    assert {(output.request_id, output.prompt) for output in outputs} == {("mine", "Hello there")}
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(want.prompt_token_ids)}
    assert [token for output in outputs for token in output.outputs[0].token_ids] == want.outputs[0].token_ids
    assert "".join(output.outputs[0].text for output in outputs) == want.outputs[0].text
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_unseeded_requests_are_seeded_in_the_order_of_arrival():
    unseeded = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, n=2)

    async def main():
        async with AsyncEngine(engine=new_engine()) as front:
            return await together(front, [(PROMPT, unseeded)] * 4)

    with new_engine() as engine:
        assert_same(asyncio.run(main()), run(engine, [(PROMPT, unseeded)] * 4))


def test_a_slow_consumer_gets_everything_and_slows_nobody(front):
    async def main():
        slow = front.generate(PROMPT, replace(GREEDY, max_tokens=60, logprobs=1))
        first = await anext(slow)
        others = await together(front, [(PROMPT[:5], replace(GREEDY, max_tokens=100))] * 2)  # 100 steps go by
        rest = [output async for output in slow]
        assert len(rest) == 1  # merged while nobody fetched it
        first.extend(rest[0])
        return first, others

    slow, others = asyncio.run(main())
    with new_engine() as engine:
        [want] = run(engine, [(PROMPT, replace(GREEDY, max_tokens=60, logprobs=1))])
    assert_same([slow], [want])
    assert [len(other.outputs[0].token_ids) for other in others] == [100, 100]


def test_one_wake_up_per_step(front):
    """However many requests run, a step's tokens come to an event loop in one call."""
    calls = 0

    async def main():
        nonlocal calls
        loop = asyncio.get_running_loop()
        schedule = loop.call_soon_threadsafe

        def counted(*arguments, **options):
            nonlocal calls
            calls += 1
            return schedule(*arguments, **options)

        loop.call_soon_threadsafe = counted
        steps = (await front.stats())["steps"]
        await together(front, [(PROMPT, replace(GREEDY, max_tokens=30))] * 16)
        return (await front.stats())["steps"] - steps

    steps = asyncio.run(main())
    assert steps >= 30
    assert calls <= steps + 4  # two answers to `stats` and the steps around the ends


# ---- leaving early --------------------------------------------------------------------------------------


async def running(front, count=1):
    while (await front.stats())["num_requests_running"] < count:
        await asyncio.sleep(0.002)


def test_cancelling_a_task_frees_its_pages_and_disturbs_nobody(front):
    async def main():
        tasks = [asyncio.create_task(collected(front, PROMPT, ENDLESS)) for _ in range(3)]
        neighbour = asyncio.create_task(collected(front, PROMPT[:7], replace(GREEDY, max_tokens=60)))
        await running(front, 4)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in ended] == [asyncio.CancelledError] * 3
        result = await neighbour
        await idle(front)
        return result

    result = asyncio.run(main())
    with new_engine() as engine:
        assert_same([result], run(engine, [(PROMPT[:7], replace(GREEDY, max_tokens=60))]))


def test_cancelled_before_the_first_output(front):
    """In the same turn of the event loop, and while it waits for a slot."""

    async def main():
        task = asyncio.create_task(collected(front, PROMPT, ENDLESS))
        await asyncio.sleep(0)
        task.cancel()
        fill = [asyncio.create_task(collected(front, PROMPT, ENDLESS)) for _ in range(33)]  # 32 slots
        while not (await front.stats())["num_requests_waiting"]:
            await asyncio.sleep(0.002)
        for other in reversed(fill):  # the waiting one first
            other.cancel()
        await asyncio.gather(task, *fill, return_exceptions=True)
        await idle(front)

    asyncio.run(main())


@pytest.mark.parametrize("way", ["break", "aclose", "dropped", "end of the event loop"])
def test_leaving_the_iterator_aborts(front, way):
    aborted = lambda: asyncio.run(front.stats()).get("request_success_abort", 0)
    before = aborted()

    async def main():
        outputs = front.generate(PROMPT, ENDLESS)
        async for _ in outputs:
            break
        if way == "aclose":
            await outputs.aclose()
        elif way == "dropped":
            del outputs
            gc.collect()
            await asyncio.sleep(0)
        if way != "end of the event loop" and way != "break":
            await idle(front)

    asyncio.run(main())
    asyncio.run(idle(front))
    assert aborted() == before + 1


def test_an_iterator_that_was_never_begun_costs_nothing(front):
    async def main():
        before = (await front.stats())["prompt_tokens"]
        outputs = front.generate(PROMPT, ENDLESS, request_id="never")
        del outputs
        gc.collect()
        assert (await front.stats())["prompt_tokens"] == before
        await collected(front, PROMPT, request_id="never")

    asyncio.run(main())


def test_abort_by_id_ends_the_iterator(front):
    async def main():
        outputs = []
        async for output in front.generate(PROMPT, ENDLESS, request_id="a"):
            outputs.append(output)
            if len(outputs) == 2:
                front.abort("a")
                front.abort("unknown")
        return outputs

    outputs = asyncio.run(main())
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert 2 <= sum(len(output.outputs[0].token_ids) for output in outputs) < 480


# ---- errors ---------------------------------------------------------------------------------------------


def test_a_wrong_request_is_refused_in_its_own_caller_only(front, expected):
    class Odd(list):
        def __iter__(self):
            raise KeyError("odd")

    wrong = [
        (([300], GREEDY), r"^prompt_token_ids: \[300\]: must be integers from 0 to 299"),
        (([], GREEDY), "^prompt: it holds no tokens"),
        ((None, GREEDY), "^prompt: NoneType: must be"),
        ((PROMPT, {"max_tokens": 3}), "^params=.*: params must be a SamplingParams"),
        ((Odd(PROMPT).copy, GREEDY), "^prompt: builtin_function_or_method"),
    ]

    async def main():
        good = asyncio.create_task(together(front, REQUESTS[:8]))
        for (prompt, params), message in wrong:
            with pytest.raises(ValueError, match=message):
                await collected(front, prompt, params)
        return await good

    assert_same(asyncio.run(main()), expected[:8])


def test_a_running_id_is_refused_and_can_be_used_again_afterwards(front):
    async def main():
        first = front.generate(PROMPT, replace(GREEDY, max_tokens=40), request_id="a")
        await anext(first)
        for wrong in ("a", 3):
            with pytest.raises(ValueError, match=f"^request_id={wrong!r}: request_id must be a string that no running"):
                await collected(front, PROMPT, request_id=wrong)
        await first.aclose()
        # At once: the outputs of the one before, still on their way, must not come to this one.
        return await collected(front, PROMPT[:9], request_id="a")

    result = asyncio.run(main())
    with new_engine() as engine:
        assert_same([result], run(engine, [(PROMPT[:9], GREEDY)]))


def test_a_prompt_may_be_changed_after_the_call(front):
    async def main():
        prompt = list(PROMPT)
        task = asyncio.create_task(collected(front, prompt))
        await asyncio.sleep(0)
        prompt[:] = [1]
        array = np.array(PROMPT)
        other = asyncio.create_task(collected(front, {"prompt_token_ids": array}))
        await asyncio.sleep(0)
        array[:] = 1
        return await task, await other

    results = asyncio.run(main())
    assert [result.prompt_token_ids for result in results] == [PROMPT, PROMPT]


def test_when_the_loop_dies_everybody_is_told(caplog):
    """The device fails in the middle of the work: callers in two event loops, and those who come later."""
    engine = new_engine()
    dispatch, steps = engine.runner.compute, 0

    def failing(*arguments, **options):
        nonlocal steps
        steps += 1
        if steps > 5:
            raise MemoryError("the device is gone")
        return dispatch(*arguments, **options)

    engine.runner.compute = failing
    front = AsyncEngine(engine=engine)
    errors = []

    async def callers():
        tasks = [collected(front, PROMPT, ENDLESS) for _ in range(4)]
        errors.extend(await asyncio.gather(*tasks, return_exceptions=True))

    other = threading.Thread(target=lambda: asyncio.run(callers()))
    other.start()
    asyncio.run(callers())
    other.join()
    assert [type(error) for error in errors] == [EngineDeadError] * 8
    assert {str(error) for error in errors} == {"MemoryError: the device is gone"}
    assert len(set(map(id, errors))) == 8
    assert "in failing" in errors[0].__notes__[0]
    for call in (front.stats, front.check_health, lambda: collected(front, PROMPT)):
        with pytest.raises(EngineDeadError, match="MemoryError: the device is gone"):
            asyncio.run(call())
    assert engine.runner.weights is None  # its memory is given back
    front.close()
    assert "the engine's loop has died" in caplog.text


def test_closing_ends_who_waits():
    front = AsyncEngine(engine=new_engine())

    async def main():
        task = asyncio.create_task(collected(front, PROMPT, ENDLESS))
        await running(front)
        async with front:
            pass
        with pytest.raises(EngineDeadError, match="the engine is closed"):
            await task
        with pytest.raises(EngineDeadError, match="the engine is closed"):
            await front.check_health()

    asyncio.run(main())
    front.close()


def test_who_asks_is_told_when_it_ends():
    front = AsyncEngine(engine=new_engine())

    async def main():
        told = asyncio.create_task(front.died())
        await front.check_health()
        assert not told.done()
        async with front:
            pass
        assert str(await told) == str(await front.died()) == "the engine is closed"

    asyncio.run(main())


def test_a_front_can_check_before_it_sends(front):
    """With the engine's own words, and nothing reaches the engine."""
    check = front.input_processor.check
    assert check("Hello", GREEDY) == {"prompt": "Hello", "prompt_token_ids": byte_tokenizer(VOCAB).encode("Hello")}
    assert check({"prompt_token_ids": [3], "cache_salt": "x"}, GREEDY) == {"prompt_token_ids": [3], "cache_salt": "x"}
    nothing_left = replace(GREEDY, allowed_token_ids=[9], bad_words=[byte_tokenizer(VOCAB).token_text(9)])
    wrong = [([300], GREEDY), ("", GREEDY), ("x" * 600, GREEDY), (3, GREEDY), ("x", replace(GREEDY, priority=1))]
    for prompt, params in [*wrong, ("x", replace(GREEDY, logit_bias={300: 1})), ("x", nothing_left)]:
        with pytest.raises(ValueError, match=r"must (be|hold)") as refused:
            asyncio.run(collected(front, prompt, params))
        with pytest.raises(ValueError, match=r"must (be|hold)") as checked:
            check(prompt, params)
        assert str(checked.value) == str(refused.value)


def test_a_text_that_must_be_too_long_is_refused_unread(front, monkeypatch):
    def read(*_, **__):
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(type(front.input_processor.tokenizer), "encode", read)
    with pytest.raises(ValueError, match=r"^prompt: 4000 characters: must be at most 2560"):
        front.input_processor.check("x" * 4000, GREEDY)  # 512 tokens, of which the longest, <unk>, has 5 bytes


def test_a_dropped_engine_gives_its_thread_back():
    before = set(threading.enumerate())
    front = AsyncEngine(engine=new_engine())
    [thread] = [t for t in set(threading.enumerate()) - before if t.name == "jaxserve-engine"]
    asyncio.run(front.check_health())
    del front
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_an_idle_engine_sleeps(front):
    asyncio.run(collected(front, PROMPT))
    asyncio.run(idle(front))
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_weights_are_replaced_between_steps(front):
    """The new weights' results are the new engine's; wrong ones are the caller's own error."""
    old = tiny_decoder("float32")
    new = scaled(old)

    async def main():
        with pytest.raises(ValueError, match=r"^params: 'embed' is missing"):
            await front.update_params({})
        with pytest.raises(ValueError, match=r"^running='later'"):
            await front.update_params(new, running="later")
        assert await front.update_params(new, version=7) == 7
        result = await collected(front, PROMPT, replace(GREEDY, logprobs=2))
        assert await front.update_params(old, version=0) == 0
        return result

    result = asyncio.run(main())
    assert result.outputs[0].weights_versions == [7] * 8
    with tiny_engine("float32", decoder=new, text=byte_tokenizer(VOCAB)) as other:
        assert_same([result], run(other, [(PROMPT, replace(GREEDY, logprobs=2))]))


def scaled(model):
    """Another model of the same structure."""
    import jax
    from flax import nnx

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf * 0.9 if leaf.ndim > 1 else leaf, state))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"run_in": "cloud"}, ValueError, "^run_in='cloud': run_in must be one of 'thread', 'process'"),
        ({"page_size": 7}, ValueError, "^page_size=7"),
        ({"pages": 7}, TypeError, "^EngineConfig has no field 'pages'"),
        ({"config": EngineConfig(), "page_size": 8}, TypeError, "^give one of"),
        ({"model": "/nowhere"}, ValueError, "/nowhere"),
    ],
)
def test_wrong_options_are_refused_at_once(options, error, message):
    with pytest.raises(error, match=message):
        AsyncEngine(**options)


# ---- in a process of its own ----------------------------------------------------------------------------


def test_in_a_process(tmp_path):
    """One engine in a process: results, refusals, new weights, aborts, and its death by a signal."""
    folder = str(write_tiny_checkpoint(tmp_path / "model"))
    prompt = GOLDEN.prompt.tolist()
    requests = [(prompt[: 3 + index], replace(GREEDY, temperature=0.8, seed=index, logprobs=1)) for index in range(6)]
    with Engine(model=folder, **SHAPES) as engine:
        expected = run(engine, requests)
        engine.update_params(scaled_state(folder))
        expected_later = run(engine, requests)
    with pytest.raises(ValueError, match="max_model_len"):
        AsyncEngine(model=folder, run_in="process", **{**SHAPES, "max_model_len": 10**6})
    front = AsyncEngine(model=folder, run_in="process", **SHAPES)

    async def main():
        assert_same(await together(front, requests), expected)
        with pytest.raises(ValueError, match=r"^prompt_token_ids: \[128\]"):
            await collected(front, [128])
        with pytest.raises(ValueError, match=r"^AddRequest cannot be sent to another process"):
            await collected(front, {"prompt": lambda: 0})
        async for _ in front.generate(prompt, replace(GREEDY, max_tokens=60)):
            break
        await idle(front)
        assert await front.update_params(scaled_state(folder)) == 1
        assert_same(await together(front, requests), expected_later)
        waiting = asyncio.create_task(collected(front, prompt, replace(GREEDY, max_tokens=90)))
        await running(front)
        front._channel._process.kill()
        with pytest.raises(EngineDeadError, match="the engine's process has ended with exit code -9"):
            await waiting
        with pytest.raises(EngineDeadError, match="exit code -9"):
            await front.check_health()

    asyncio.run(main())
    front.close()
    front.close()


def scaled_state(folder):
    from pathlib import Path

    from jaxserve.checkpoint.hugging_face import load_hugging_face

    return scaled(load_hugging_face(Path(folder), dtype="float32"))
