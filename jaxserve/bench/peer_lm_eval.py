"""The peer: lm-evaluation-harness's own `hf` model class, and ours, on the same requests.

Needs lm-eval, and for `hf` torch, in an environment of its own; run it as a file, from a checkout:
`python jaxserve/bench/peer_lm_eval.py hf|jaxserve MODEL_FOLDER --data gsm8k_test.jsonl [--batch_size 16]`

The prompt has 8 solved problems, the same before each of 100 others. `generate` answers them, 128 new tokens at most;
`loglikelihood` scores four numbers after each of 25.
"""

import argparse
import json
import time
from types import SimpleNamespace

SHOTS, NEW_TOKENS = 8, 128


def requests(data: str, count: int, scored: int) -> tuple[list, list]:
    """Those of `generate_until` and of `loglikelihood`."""
    with open(data, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][: SHOTS + count]
    asked = [f"Question: {row['question']}\nAnswer:" for row in rows]
    shots = "\n\n".join(f"{q} {row['answer']}" for q, row in zip(asked[:SHOTS], rows, strict=False)) + "\n\n"
    options = {"until": ["Question:"], "max_gen_toks": NEW_TOKENS, "do_sample": False}
    generate = [SimpleNamespace(args=(shots + question, dict(options))) for question in asked[SHOTS:]]
    score = [
        SimpleNamespace(args=(shots + question, f" {number}"))
        for question, row in zip(asked[SHOTS:][:scored], rows[SHOTS:][:scored], strict=True)
        for number in _numbers(row["answer"])
    ]
    return generate, score


def _numbers(answer: str) -> list[int]:
    """The right one and three others."""
    right = int(answer.split("####")[-1].strip().replace(",", ""))
    return [right, right + 1, right + 10, 2 * right + 3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=("hf", "jaxserve"))
    parser.add_argument("pretrained")
    parser.add_argument("--data", required=True, help="a JSONL file of GSM8K's form")
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--scored_items", type=int, default=25)
    parser.add_argument("--batch_size", type=int, default=16, help="of hf")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    shared = {"pretrained": options.pretrained, "dtype": options.dtype, "max_length": 2048}
    if options.model == "hf":
        from lm_eval.models.huggingface import HFLM

        lm = HFLM(**shared, batch_size=options.batch_size, device="cpu")
    else:
        from jaxserve.evaluation.lm_eval_model import JaxserveLM

        lm = JaxserveLM(**shared)
    generate, score = requests(options.data, options.items, options.scored_items)
    lm.generate_until(generate[:2])  # programs are compiled, or loaded
    lm.loglikelihood(score[:2])
    for name, run, work in (
        ("generate_until", lm.generate_until, generate),
        ("loglikelihood", lm.loglikelihood, score),
    ):
        started = time.perf_counter()
        results = run(work)
        seconds = time.perf_counter() - started
        total = sum(len(text) for text in results) if name == "generate_until" else sum(value for value, _ in results)
        print(
            f"{options.model} {name}: {len(work)} requests in {seconds:.1f} s, {len(work) / seconds:.2f}/s, {total:.3f}"
        )


if __name__ == "__main__":
    main()
