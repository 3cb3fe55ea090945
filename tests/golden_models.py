"""The tiny golden models, made by transformers (see `goldens/make_tiny_goldens.py`)."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

FOLDER = Path(__file__).parent / "goldens" / "tiny"
GOLDEN_NAMES = tuple(sorted(file.stem for file in FOLDER.glob("*.npz")))


class Golden(NamedTuple):
    """`logits` has a row for every position of `prompt`; `margins[i]` is the lead of the best token over the
    second best where `continuation[i]` (greedy) was chosen; `max_model_len` matters to rope `dynamic` only.
    """

    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    prompt: np.ndarray
    logits: np.ndarray
    continuation: np.ndarray
    margins: np.ndarray
    max_model_len: int | None

    def certain_length(self, least_margin: float = 1e-3) -> int:
        """How many tokens of the continuation come before the first margin under `least_margin`."""
        close = np.flatnonzero(self.margins < least_margin)
        return int(close[0]) if close.size else len(self.continuation)


def load_golden(name: str) -> Golden:
    with np.load(FOLDER / f"{name}.npz") as file:
        weights = {key.removeprefix("weights/"): file[key] for key in file if key.startswith("weights/")}
        return Golden(
            config=json.loads(str(file["config"])),
            weights=weights,
            prompt=file["prompt"],
            logits=file["logits"],
            continuation=file["continuation"],
            margins=file["margins"],
            max_model_len=int(file["max_model_len"]) or None,
        )


def write_checkpoint(golden: Golden, folder: Path, shards: int = 1) -> Path:
    """Writes `config.json` and safetensors (with an index beyond one shard); returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden.config))
    # safetensors writes the memory as it lies: a transposed view would be stored wrongly.
    weights = {name: np.ascontiguousarray(value) for name, value in golden.weights.items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in list(weights)[shard::shards]}
        save_file(part, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
