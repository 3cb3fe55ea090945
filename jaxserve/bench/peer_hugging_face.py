"""The peer: Hugging Face `generate` in static batches of 32, padded on the left, run to the longest answer.

Needs torch and transformers, in an environment of its own; run it as a file, from a checkout:
`python jaxserve/bench/peer_hugging_face.py MODEL_FOLDER [bfloat16|float32] [--cases ...]`
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from workload import CASES, Item, measure

BATCH = 32
PADDING = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("dtype", nargs="?", default="bfloat16")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def run(work: list[Item]) -> None:
        for first in range(0, len(work), BATCH):
            batch = work[first : first + BATCH]
            longest = max(len(item.prompt) for item in batch)
            padding = [longest - len(item.prompt) for item in batch]
            ids = torch.tensor([[PADDING] * pad + item.prompt for pad, item in zip(padding, batch, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
            tokens = max(item.output for item in batch)
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=PADDING,
            )

    measure(f"transformers {options.dtype}", run, options.cases, options.repeats)


if __name__ == "__main__":
    main()
