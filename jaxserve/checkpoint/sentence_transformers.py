"""What a folder says of embeddings: sentence-transformers' `modules.json` and the configuration of its pooling."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.checkpoint.hugging_face import parse_json
from jaxserve.models.config import CheckpointError, UnsupportedModelError

_KNOWN = ("Transformer", "Pooling", "Normalize")
# As flags, one of them true, and as the value of `pooling_mode`, which newer versions write.
_MODES = {"pooling_mode_lasttoken": "LAST", "pooling_mode_mean_tokens": "MEAN", "lasttoken": "LAST", "mean": "MEAN"}


class StoredPooling(NamedTuple):
    """How the checkpoint's embeddings are made; `pooling_type` is one of `config.POOLING_TYPES`."""

    pooling_type: str
    normalize: bool


def read_pooling(folder: Path) -> StoredPooling | None:
    """How this model's embeddings are made, or None if it does not say that it is one for embeddings.

    UnsupportedModelError for a way that there is not: another pooling than of the last token or the mean, or layers
    behind it.
    """
    file = folder / "modules.json"
    if not file.is_file():
        return None
    modules = _modules(file)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if unknown := [kind for kind in kinds if kind not in _KNOWN]:
        raise UnsupportedModelError(f"{file}: a module {unknown[0]!r} is not supported; known: {', '.join(_KNOWN)}")
    if "Pooling" not in kinds:
        return None
    path = modules[kinds.index("Pooling")].get("path")
    if not isinstance(path, str):
        raise CheckpointError(f"{file}: path={path!r} of the pooling, but it must be the name of a folder")
    return StoredPooling(_pooling_type(folder / path / "config.json"), "Normalize" in kinds)


def _pooling_type(file: Path) -> str:
    if not file.is_file():
        raise CheckpointError(f"{file}: the file is missing")
    values: dict[str, Any] = parse_json(file.read_bytes(), file)
    chosen = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    if "pooling_mode" in values:
        chosen = [values["pooling_mode"]]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise UnsupportedModelError(f"{file}: pooling {chosen} is not supported; one of {', '.join(_MODES)} is")
    return _MODES[chosen[0]]


def _modules(file: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{file}: not a JSON list of objects")
    return modules
