"""Offline throughput of the engine on the common work: `python -m jaxserve.bench.offline [--dtype float32] ...`"""

import argparse

from jaxserve import Engine, SamplingParams
from jaxserve.bench.workload import CASES, Item, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id (default: the demo model)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--deterministic", default="auto", choices=["auto", "true", "false"])
    parser.add_argument("--max-num-batched-tokens", type=int, default=128)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    engine = Engine(
        model=options.model,
        dtype=options.dtype,
        deterministic={"auto": "auto", "true": True, "false": False}[options.deterministic],
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=2048,
        enable_prefix_caching=False,  # the peers have it off, and random prompts share nothing
    )

    def run(work: list[Item]) -> None:
        for index, item in enumerate(work):
            params = SamplingParams(temperature=0, max_tokens=item.output, ignore_eos=True)
            engine.add_request(str(index), item.prompt, params)
        while engine.has_unfinished():
            engine.step()

    name = f"jaxserve {options.dtype} det={str(engine.deterministic).lower()}"
    measure(name, run, options.cases, options.repeats)
    stats = engine.stats()
    print(f"padding waste {stats['padding_waste']:.1%}, KV waste {stats['kv_waste']:.1%}, {stats['steps']} steps")


if __name__ == "__main__":
    main()
