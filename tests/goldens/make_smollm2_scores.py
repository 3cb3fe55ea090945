"""Makes smollm2_scores.npz: log-likelihoods of continuations by transformers in float32.

    python make_smollm2_scores.py SmolLM2-135M-Instruct.Q4_1.gguf        (Python 3.11, torch 2.13, transformers 5)

Token ids come from `make_smollm2_goldens.correct_tokenizer`; prompt and continuation are encoded as one text.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from make_smollm2_goldens import correct_tokenizer, flat
from transformers import AutoModelForCausalLM

QUESTION = "Question: What do bees make?\nAnswer:"
PAIRS = [
    (QUESTION, " honey"),
    (QUESTION, " a lot of noise in the garden"),
    (QUESTION, " Honey"),
    ("The capital of France is ", "Paris, on the Seine."),  # white space goes with the continuation
    ("The capital of France is", " Lyon."),
    ("def add(a, b):\n", "    return a + b\n"),
    ("Der Himmel ist", " blau, und 日本 liegt im Osten 🎉"),
    ("One, two, three, four, five, six, seven,", " eight, nine, ten"),
    ("A list of numbers: " + ", ".join(map(str, range(300))) + ",", " 300, 301"),
]


@torch.no_grad()
def main(gguf: Path) -> None:
    tokenizer = correct_tokenizer(gguf.parent, gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    ids, starts, token_logprobs, greedy = [], [], [], []
    for prompt, continuation in PAIRS:
        kept = prompt.rstrip()
        tokens = tokenizer(kept + prompt[len(kept) :] + continuation).input_ids
        start = len(tokenizer(kept).input_ids)
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        rows = logprobs[start - 1 : -1]
        own = rows.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]
        ids.append(tokens)
        starts.append(start)
        token_logprobs.append(own.numpy())
        greedy.append(bool((rows.argmax(-1) == torch.tensor(tokens[start:])).all()))
        print(f"{own.sum():9.3f} {greedy[-1]!s:5} {continuation!r}")
    np.savez_compressed(
        Path(__file__).with_name("smollm2_scores.npz"),
        pairs=np.frombuffer(json.dumps(PAIRS).encode(), np.uint8),
        starts=np.array(starts, np.int32),
        greedy=np.array(greedy),
        token_logprobs=np.concatenate(token_logprobs),
        **flat("ids", ids),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
