"""Makes smollm2_evaluation.npz: 200 log-likelihoods and perplexities by transformers in float32, on the example data.

    python make_smollm2_evaluation.py SmolLM2-135M-Instruct.Q4_1.gguf    (Python 3.11, torch 2.13, transformers 5)

The 200 continuations: four answers to each of 20 questions, and six numbers after each of 20 word problems.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from make_smollm2_goldens import correct_tokenizer
from transformers import AutoModelForCausalLM

DATA = Path(__file__).parent.parent.parent / "configs" / "evaluation"
WINDOW, STRIDE = 128, 64


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


@torch.no_grad()
def token_logprobs(model, tokens: list[int]) -> torch.Tensor:
    """Of every token but the first."""
    logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].double()


def main(gguf: Path) -> None:
    tokenizer = correct_tokenizer(gguf.parent, gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()

    def score(prompt: str, continuation: str) -> float:
        tokens, start = tokenizer(prompt + continuation).input_ids, len(tokenizer(prompt).input_ids)
        return float(token_logprobs(model, tokens)[start - 1 :].sum())

    choices, numbers = [], []
    for row in rows("multiple_choice"):
        prompt = f"Question: {row['question']}\nAnswer:"
        choices.append([score(prompt, f" {choice}") for choice in row["choices"]])
    for row in rows("arithmetic"):
        right = int(row["answer"].split("####")[-1])
        prompt = f"Question: {row['question']}\nAnswer:"
        numbers.append([score(prompt, f" {number}") for number in range(right - 2, right + 4)])
    texts = []
    for row in rows("passages"):
        tokens, total, scored = tokenizer(row["text"]).input_ids, 0.0, 1
        for begin in range(0, len(tokens), STRIDE):
            end = min(begin + WINDOW, len(tokens))
            total += float(token_logprobs(model, tokens[begin:end])[scored - begin - 1 :].sum())
            scored = end
            if end == len(tokens):
                break
        texts.append((total, len(tokens) - 1))
    print(f"perplexity {np.exp(-sum(t for t, _ in texts) / sum(n for _, n in texts)):.4f}")
    np.savez_compressed(
        Path(__file__).with_name("smollm2_evaluation.npz"),
        choices=np.array(choices),
        numbers=np.array(numbers),
        texts=np.array(texts),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
