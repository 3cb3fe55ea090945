"""A model of any readable format as a self-contained folder, in one dtype: `jaxserve convert`.

output/config.json ...      what describes the model, its tokenizer files, generation_config.json
output/model.safetensors    the weights under Hugging Face's names, for other programs (format hugging_face, both)
output/orbax/               the weights as the engine holds them (format orbax, both)
"""

import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxserve.checkpoint.hugging_face import (
    dtype_of,
    load_hugging_face,
    model_tensors,
    parse_json,
    read_config,
    read_tensor,
)
from jaxserve.checkpoint.loading import model_folder
from jaxserve.checkpoint.model_cache import say
from jaxserve.checkpoint.orbax import holds_orbax, load_orbax, save_orbax
from jaxserve.checkpoint.safetensors_file import write_safetensors
from jaxserve.config import DTYPES
from jaxserve.models.config import ModelConfig
from jaxserve.validation import require

FORMATS = ("orbax", "hugging_face", "both")
_WEIGHTS = "model.safetensors"
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")


@no_type_check  # it checks itself: the tests' type checker would come first with another error
def convert(
    model: str | Path | None, output: str | Path, *, dtype: str = "auto", format: str = "both", overwrite: bool = False
) -> Path:
    """Write `model` (as in EngineConfig) to the folder `output` and return it; nothing half-written is left behind.

    Raises ValueError for an option that breaks a rule, for an `output` that exists (with `overwrite`, a model's
    folder is replaced), and for a model that cannot be read or whose values `dtype` cannot hold.
    """
    require(format in FORMATS, "format", format, f"one of {', '.join(FORMATS)}")
    require(dtype in DTYPES, "dtype", dtype, f"one of {', '.join(DTYPES)}")
    output = Path(output).expanduser().absolute()
    _check_output(output, overwrite)
    source = model_folder(model)
    for place in (source, Path(model or source).expanduser()):
        within = place.exists() and place.resolve().is_relative_to(output.resolve())
        require(not within, "output", str(output), f"another folder than that of the model, {place}")
    config = read_config(source)
    dtype = dtype_of(config, dtype).name
    if format != "orbax" and not _holds_safetensors(source) and holds_orbax(source):
        raise ValueError(f"format={format!r}: {source} holds an Orbax tree only, which can be written as 'orbax' alone")
    say(f"converting {source} to {output} in {dtype}")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-unfinished-", dir=output.parent) as scratch:
        finished = Path(scratch) / "finished"
        finished.mkdir()
        _copy_description(source, finished, dtype)
        if format != "orbax":
            _write_hugging_face(source, config, finished, dtype)
        if format != "hugging_face":
            _write_orbax(source, finished, dtype)
        _replace(output, finished, Path(scratch) / "replaced")
    return output


def _holds_safetensors(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _replace(output: Path, finished: Path, aside: Path) -> None:
    """Give `finished` its name; what had it before is put aside, and back if that fails."""
    if output.exists():
        output.rename(aside)
    try:
        finished.rename(output)
    except OSError:
        if aside.exists():
            aside.rename(output)
        raise


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    require(overwrite, "output", str(output), "a folder that does not exist yet, unless overwrite is set")
    # So that a mistyped name cannot cost somebody's home.
    is_model = (output / "config.json").is_file()
    require(
        is_model, "output", str(output), "the folder of a model (with config.json) where overwrite is to replace it"
    )


def _copy_description(source: Path, folder: Path, dtype: str) -> None:
    """Everything but the weights; config.json names the new dtype in both spellings, since each has its readers."""
    for file in sorted(source.iterdir()):
        described = file.suffix in _COPIED_SUFFIXES and not file.name.endswith(".index.json")
        if file.is_file() and (described or file.name.startswith(("LICENSE", "NOTICE"))):
            shutil.copyfile(file, folder / file.name)
        elif (part := file / "config.json").is_file():  # of sentence-transformers' pooling
            (folder / file.name).mkdir()
            shutil.copyfile(part, folder / file.name / part.name)
    file = source / "config.json"
    config = parse_json(file.read_bytes(), file) | {"dtype": dtype, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_hugging_face(source: Path, config: ModelConfig, folder: Path, dtype: str) -> None:
    tensors = model_tensors(source, config)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    size = sum(math.prod(shape) for shape in shapes.values()) * np.dtype(dtype).itemsize
    with tqdm(total=size, unit="B", unit_scale=True, mininterval=0.5, desc=_WEIGHTS) as progress:

        def value(name: str) -> np.ndarray:
            cast = read_tensor(name, tensors[name], dtype)
            progress.update(cast.nbytes)
            return cast

        write_safetensors(folder / _WEIGHTS, shapes, dtype, value)


def _write_orbax(source: Path, folder: Path, dtype: str) -> None:
    say("writing the tree for Orbax")
    # Of two formats the one that every version reads.
    load = load_hugging_face if _holds_safetensors(source) else load_orbax
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # an accelerator's memory is not needed
        save_orbax(load(source, dtype=jnp.dtype(dtype)), folder)
