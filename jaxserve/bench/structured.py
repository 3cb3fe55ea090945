"""What masks cost: throughput with structured output against without. `python -m jaxserve.bench.structured [MODEL]`

The same prompts and lengths, sampled at temperature 1: free, and under a schema whose outputs never end before their
length (so that both make the same number of tokens). `--json` prints figures for programs.
"""

import argparse
import json
import statistics
from typing import Any

from jaxserve import Engine, SamplingParams
from jaxserve.bench.throughput import measure
from jaxserve.bench.workload import fixed

# Objects without end: names and nested values, as programs ask for them.
ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["person", "place", "thing"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "size": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
    "required": ["name", "kind", "tags", "size"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ROW, "minItems": 1000}


def compare(engine: Engine, batch: int, prompt: int, output: int, repeats: int) -> dict[str, Any]:
    """Output tokens a second, free and constrained, and the constrained ones' share of the others'."""
    work = fixed(batch, prompt, output, vocab=engine.model_config.vocab_size)
    free = SamplingParams(seed=1, ignore_eos=True)
    constrained = SamplingParams(seed=1, ignore_eos=True, structured_outputs={"json": SCHEMA})
    rates: dict[str, list[float]] = {"free": [], "constrained": []}
    for _ in range(repeats):  # by turns: the machine's speed drifts
        for name, params in (("free", free), ("constrained", constrained)):
            rates[name].append(measure(engine, name, work, params, show=False).output_tokens_per_s)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {"batch": batch, **medians, "share": medians["constrained"] / medians["free"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--batch", type=int, nargs="+", default=[16])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with Engine(model=arguments.model, max_num_seqs=max(arguments.batch), max_model_len=512) as engine:
        for batch in arguments.batch:
            found = compare(engine, batch, arguments.prompt, arguments.output, arguments.repeats)
            if arguments.json:
                print(json.dumps(found))
            else:
                rates = f"{found['free']:.1f} free, {found['constrained']:.1f} constrained output tokens/s"
                print(f"batch {batch}: {rates}, {found['share']:.1%}")


if __name__ == "__main__":
    main()
