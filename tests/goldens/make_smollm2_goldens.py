"""Write smollm2.npz: what Hugging Face transformers makes of the demo model's original GGUF file.

    python make_smollm2_goldens.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

Needs torch, transformers 5, accelerate and gguf (not the project's environment); nothing of jaxserve
takes part, so a mistake in its conversion cannot agree with itself. Made with transformers 5.24.0 and
torch 2.13.0 on a CPU, in float32.

Tokenizer. The weights come from transformers' GGUF reader as they are, but its tokenizer is wrong
about this file in one point, corrected here. `tokenizer.ggml.pre` is `smollm`; transformers 5.24
(integrations/gguf/gguf_tokenizer_mapping.py) has no entry of that name and falls back on GPT-2's
pre-tokenizer alone, which keeps a space and the digits after it together. The model was trained with
each digit cut off first: Hugging Face's own tokenizer.json of SmolLM2 says Digits(individual_digits=True),
then ByteLevel(add_prefix_space=False, use_regex=True), and llama.cpp (src/llama-vocab.cpp,
LLAMA_VOCAB_PRE_TYPE_SMOLLM) splits by `\\p{N}`, then by GPT-2's pattern. The vocabulary agrees: no
token joins a digit with anything. Since it holds no such token the two rules differ only in what stands
before or around a number: two spaces and a digit are `ĠĠ`, `1` and not `Ġ`, `Ġ`, `1`; a space and
`½` or an Arabic digit are not merged. The script checks that texts without numerals are the same by
both rules, and counts the others that differ.

Contents (lists of lists are stored flat, with `*_starts` of length n + 1):
    texts                   UTF-8 JSON {"prompts": [...], "encodings": [...], "weights": [names]}
    prompt_ids(_starts)     token ids of the prompts
    positions [P, 3]        three positions of each prompt, the last one last
    top_ids, top_logits [P, 3, 256]      the largest logits there, in falling order
    random_ids [512], random_logits [P, 3, 512], logsumexp [P, 3]
    continuations [P, 64]   greedy, not stopped by the end-of-text token
    margins [P, 64]         largest logit minus second largest at each step
    encoding_ids(_starts)   token ids of `encodings`
    weight_norms [W] (float64), weight_positions [W, 16] (flat), weight_values [W, 16]
"""

import itertools
import json
import random
import sys
import unicodedata
from pathlib import Path

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 64
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
STORY = (
    "The lighthouse keeper wrote every evening in a thick brown book. She noted the wind, the height of the "
    "waves, the ships that passed and the birds that rested on the railing. On some evenings there was "
    "nothing to write, and then she described the silence. "
)


def chat(*messages: str) -> str:
    """The model's chat format, written out by hand; user and assistant take turns."""
    turns = zip(itertools.cycle(["user", "assistant"]), messages)
    body = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{body}<|im_start|>assistant\n"


PROMPTS = [
    chat("What is gravity?"),
    chat(
        "My name is Ada.",
        "Hello Ada! How can I help you?",
        "Write a haiku about the sea, with my name in it.",
    ),
    chat("Compute 12 * 34 + 5, step by step."),
    "The capital of France is",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "Prices in 2023:  1999, 2,450.75 and   10000 dollars. In 2024:",
    "Überraschung: der Bär aß 3 süße Äpfel. 日本語のテキスト 🎉 naïve café —",
    "Once",
    "import numpy as np\n\nfor i in range(10):\n\tx = np.arange(i) ** 2\n\tprint(",
    STORY * 6 + "One morning the book was gone, and",
]

# fmt: off
FRAGMENTS = [
    "the", "The", " cat", "cats", "'s", "'ll", "don't", "DON'T", " I'm", "x", "  ", "   ", "\t",
    "    return", "1", "12", "007", "3.14", "1,000", " 5", " 42", "½", "²", "Ⅷ", "١٢", "𝟙𝟚", "é",
    "ß", "ñandú", "日本", "語", " 한국어", "привет", "שלום", "🎉", "👩\u200d👩\u200d👧", "🇫🇷", "\u200b", " ",
    "…", "—", "“quote”", "!", "?!", "...", "==", "!=", "->", "{}", "[0]", "</p>", "&amp;", "#",
    "@user", "http://example.org/a?b=1", "<", "im_start", ">", "im_end", "endoftext", "user",
    "snake_case", "CamelCase", "ALLCAPS", "e-mail", "2nd", "A4", "v1.2.3", "�", "\r", "\x00",
    "\x7f", "\ufeff", "q\u0308", "ﬁ", "Å", "ﷺ", "a", "aa", "aaaaaaaaaaaaaaaaaaaaaaaa", " a", "0x1F",
    "1e-5", "-1", "+", "%d", "\\n", "$5", "€", "½ ", "٣ ", "\n", "\n\n", " \n", "\n ", "\r\n", "|",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start", "|>user",
]
# fmt: on


def encodings() -> list[str]:
    """Short texts of every kind, and seeded mixtures of them."""
    draw = random.Random(0)
    mixed = ["".join(draw.choices(FRAGMENTS, k=draw.randint(2, 8))) for _ in range(250)]
    return list(dict.fromkeys([*FRAGMENTS, *mixed]))


def correct_tokenizer(folder: Path, name: str):
    """transformers' tokenizer of the GGUF file with each numeral cut off first (see above)."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    texts = encodings()
    uncorrected = [tokenizer(text).input_ids for text in texts]
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    pairs = zip(texts, uncorrected, strict=True)
    differing = [text for text, ids in pairs if tokenizer(text).input_ids != ids]
    print(f"{len(differing)} of {len(texts)} texts differ by the pre-tokenizer, among them {differing[:5]}")
    for text in differing:
        assert any(unicodedata.category(char).startswith("N") for char in text), text
    return tokenizer


@torch.no_grad()
def logits_at(model, ids: list[int], positions: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0, positions]


@torch.no_grad()
def continue_greedily(model, ids: list[int]) -> tuple[list[int], list[float]]:
    tokens, margins, cache, new = [], [], None, ids
    for _ in range(STEPS):
        output = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
        best = output.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        cache, new = output.past_key_values, tokens[-1:]
    return tokens, margins


def flat(name: str, lists: list[list[int]]) -> dict[str, np.ndarray]:
    starts = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    return {name: np.concatenate(lists).astype(np.int32), f"{name}_starts": starts}


def weight_samples(model) -> tuple[list[str], dict[str, np.ndarray]]:
    weights = dict(model.named_parameters())  # a tied head appears once, as the embedding
    generator = np.random.default_rng(0)
    norms, positions, values = [], [], []
    for weight in weights.values():
        numbers = weight.detach().numpy().ravel()
        norms.append(np.linalg.norm(numbers.astype(np.float64)))
        positions.append(generator.integers(0, numbers.size, 16))
        values.append(numbers[positions[-1]])
    arrays = {"weight_norms": np.array(norms), "weight_positions": np.stack(positions).astype(np.int64)}
    return list(weights), arrays | {"weight_values": np.stack(values)}


def main(gguf: Path) -> None:
    tokenizer = correct_tokenizer(gguf.parent, gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    prompt_ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    print("prompt lengths:", [len(ids) for ids in prompt_ids])
    positions = [[len(ids) // 3, 2 * len(ids) // 3, len(ids) - 1] for ids in prompt_ids]
    logits = torch.stack([logits_at(model, ids, at) for ids, at in zip(prompt_ids, positions, strict=True)])
    top = logits.topk(256)
    random_ids = np.random.default_rng(1).choice(logits.shape[-1], 512, replace=False)
    greedy = [continue_greedily(model, ids) for ids in prompt_ids]
    for ids, row in greedy:
        print(f"smallest margin {min(row):.4f}: {tokenizer.decode(ids)!r}")
    names, weights = weight_samples(model)
    texts = {"prompts": PROMPTS, "encodings": encodings(), "weights": names}
    out = Path(__file__).with_name("smollm2.npz")
    np.savez_compressed(
        out,
        texts=np.frombuffer(json.dumps(texts).encode(), np.uint8),
        positions=np.array(positions, np.int32),
        top_ids=top.indices.numpy().astype(np.int32),
        top_logits=top.values.numpy(),
        random_ids=random_ids.astype(np.int32),
        random_logits=logits[..., torch.from_numpy(random_ids)].numpy(),
        logsumexp=logits.logsumexp(-1).numpy(),
        continuations=np.array([ids for ids, _ in greedy], np.int32),
        margins=np.array([row for _, row in greedy], np.float32),
        **flat("prompt_ids", prompt_ids),
        **flat("encoding_ids", [tokenizer(text).input_ids for text in texts["encodings"]]),
        **weights,
    )
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
