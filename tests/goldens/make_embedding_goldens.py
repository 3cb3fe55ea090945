"""Makes `embeddings.npz`: embeddings that torch pools from transformers' hidden states of some tiny golden models.

    python tests/goldens/make_embedding_goldens.py        (needs torch, transformers 5 and safetensors; takes seconds)

`model/kind/i` is the embedding, not normalised, of prompt i (`prompts` cut at `starts`) with pooling `kind`.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from golden_models import load_golden, write_checkpoint  # noqa: E402

LENGTHS = (1, 7, 8, 17, 40, 80)


@torch.no_grad()
def main() -> None:
    source = np.random.default_rng(5)
    prompts = [source.integers(3, 128, length).astype(np.int32) for length in LENGTHS]
    arrays = {"prompts": np.concatenate(prompts), "starts": np.cumsum([0, *LENGTHS])}
    for name in ("qwen3", "llama3"):
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(load_golden(name), Path(folder) / name)
            model = AutoModel.from_pretrained(Path(folder) / name, dtype=torch.float64, attn_implementation="eager")
        for index, prompt in enumerate(prompts):
            states = model(torch.tensor(prompt[None].astype(np.int64))).last_hidden_state[0]  # behind the last norm
            arrays[f"{name}/MEAN/{index}"] = states.mean(0).numpy().astype(np.float32)
            arrays[f"{name}/LAST/{index}"] = states[-1].numpy().astype(np.float32)
    np.savez_compressed(HERE / "embeddings.npz", **arrays)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
