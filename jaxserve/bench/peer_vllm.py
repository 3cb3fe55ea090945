"""The peer: vLLM's offline engine (its CPU build, or any other), in its default compiled mode unless told `--eager`.

Needs vllm, in an environment of its own; run it as a file, from a checkout:
`python jaxserve/bench/peer_vllm.py MODEL_FOLDER [bfloat16|float32] [--cases ...] [--cores 0-1]`
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from workload import CASES, Item, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("dtype", nargs="?", default="bfloat16")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--cores", help="cores of its CPU build, like 0-1; vLLM's own choice leaves one core free")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    if options.cores:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = options.cores
    from vllm import LLM, SamplingParams

    llm = LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=2048,
        max_num_seqs=64,
        enforce_eager=options.eager,
        enable_prefix_caching=False,  # the repeats are the same prompts
    )

    def run(work: list[Item]) -> None:
        llm.generate(
            [{"prompt_token_ids": item.prompt} for item in work],
            [SamplingParams(temperature=0, max_tokens=item.output, ignore_eos=True, detokenize=False) for item in work],
            use_tqdm=False,
        )

    measure(f"vllm {options.dtype}", run, options.cases, options.repeats)


if __name__ == "__main__":  # vLLM starts its engine in a process that imports this file again
    main()
