"""Makes `beams.json`: what transformers' beam search finds with some of the tiny golden models.

    python tests/goldens/make_beam_goldens.py        (needs torch, transformers 5 and safetensors; takes seconds)

Cases in which float32 and float64 disagree hang on a near tie and are left out.
"""

import json
import sys
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from golden_models import load_golden, write_checkpoint  # noqa: E402

PENALTIES, STOPPING = (0.0, 1.0, 2.0, -1.0), (False, True, "never")


@torch.no_grad()
def search(model, prompt: np.ndarray, case: dict) -> list:
    found = model.generate(
        torch.tensor(prompt[None].astype(np.int64)),
        num_beams=case["beam_width"],
        num_return_sequences=case["beam_width"],
        max_new_tokens=case["max_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        eos_token_id=case["eos_token_id"],
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ends = set(case["eos_token_id"] or ())
    sequences = []
    for row, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        stop = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        sequences.append([row[: stop + 1], score])
    return sequences


def main() -> None:
    cases = []
    for name in ("llama3", "qwen3"):
        golden = load_golden(name)
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(golden, Path(folder) / name)
            models = [
                AutoModelForCausalLM.from_pretrained(Path(folder) / name, dtype=dtype, attn_implementation="eager")
                for dtype in (torch.float32, torch.float64)
            ]
        settings = product((2, 3, 8), PENALTIES, STOPPING, (None, [2], list(range(40, 52))))
        for index, (width, penalty, stopping, ends) in enumerate(settings):
            if width == 8 and index % 3:  # enough of the large ones
                continue
            prompt = golden.prompt[index % 7 : 9 + index % 11]
            case = {"model": name, "prompt": prompt.tolist(), "beam_width": width, "length_penalty": penalty}
            case |= {"max_tokens": 4 + index % 9, "early_stopping": stopping, "eos_token_id": ends}
            ours, exact = (search(model, prompt, case) for model in models)
            if [tokens for tokens, _ in ours] == [tokens for tokens, _ in exact]:
                cases.append(case | {"sequences": [[tokens, round(score, 6)] for tokens, score in exact]})
    text = "[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]\n"
    (HERE / "beams.json").write_text(text)
    print(len(cases), "cases,", len(text), "bytes")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
