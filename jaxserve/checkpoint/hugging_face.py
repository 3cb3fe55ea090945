"""Hugging Face checkpoints: a local folder or a hub id, `config.json` and safetensors, to a filled Decoder.

Everything that can be wrong with the files is found from their headers, before any device memory is taken.
Tensors are then read through a memory map, one parameter at a time.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve.models.config import DTYPES, CheckpointError, ModelConfig, UnsupportedModelError
from jaxserve.models.decoder import Decoder
from jaxserve.models.fields import Fields, nearest
from jaxserve.models.weights import JUNK, build_decoder, check_tensors

_STORED_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_ITEM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1} | {name: dtype.itemsize for name, dtype in _STORED_DTYPES.items()}
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
# What generation_config.json may say about sampling, and SamplingParams' names for it: those that vLLM takes over.
_GENERATION_DEFAULTS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_BARE_EMBED = "embed_tokens.weight"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class StoredTensor(NamedTuple):
    """Where a tensor lies: `offset` is in bytes from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> np.ndarray:
        """A read-only view of the memory-mapped file."""
        dtype = _STORED_DTYPES[self.dtype]
        return np.memmap(self.file, dtype=dtype, mode="r", offset=self.offset, shape=self.shape)


def resolve_model(name: str, *, revision: str | None = None, cache_dir: Path | None = None) -> Path:
    """The folder of a model: `name` is a local folder or a hub id (`owner/name`).

    A hub id is fetched through huggingface_hub, or found in its cache (`HF_HUB_OFFLINE=1` looks only there).
    """
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"model={name!r} is neither an existing folder nor a hub id; give the path of a folder with "
            "config.json and safetensors files, or an id like 'owner/name'"
        )
    from huggingface_hub import snapshot_download  # it takes a while to import, and folders do not need it

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, allow_patterns=_HUB_FILES))
    except Exception as error:  # errors of the network, the hub and the cache share no base class
        raise CheckpointError(
            f"model={name!r} is not an existing folder, and huggingface_hub could not provide it "
            f"({type(error).__name__}). Connect to the network once to download it, set HF_HOME to a folder "
            "whose hub cache holds it, or give the path of a folder with config.json and safetensors files"
        ) from error


def read_config(folder: Path, *, max_model_len: int | None = None) -> ModelConfig:
    """The model's configuration; the ends of sequence of `generation_config.json` are added to its own.

    Where `config.json` names no dtype, it is the one that all tensors are stored in, if there is one.
    """
    values = _read_json(folder / "config.json")
    if (folder / "modules.json").is_file():
        values |= _without_head(folder, values)
    generation_file = folder / "generation_config.json"
    if generation_file.is_file():
        where, defaults = "generation_config.json", {"eos_token_id": None}
        generation = Fields(values=_read_json(generation_file), where=where, defaults=defaults)
        own = Fields(values=values, where="config.json", defaults=defaults).token_ids("eos_token_id")
        values["eos_token_id"] = list(dict.fromkeys(own + generation.token_ids("eos_token_id")))
    config = ModelConfig.from_hf(values, max_model_len=max_model_len)
    if config.dtype is None:
        stored = {tensor.dtype for tensor in read_headers(folder).values()}
        known = [_STORED_DTYPES[name].name for name in stored if name in _STORED_DTYPES]
        config = replace(config, dtype=known[0] if len(known) == 1 else None)
    return config


def _without_head(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """What is to be read differently of a model for embeddings: it may be stored, and called, as one without a head.
    The embedding then stands in its place; nobody asks for it."""
    changes, names = {}, values.get("architectures")
    if isinstance(names, list) and len(names) == 1 and str(names[0]).endswith("Model"):
        changes["architectures"] = [f"{names[0].removesuffix('Model')}ForCausalLM"]
    stored = holds_safetensors(folder) and "lm_head.weight" not in read_headers(folder)
    return changes | ({"tie_word_embeddings": True} if stored else {})


def read_generation_defaults(folder: Path) -> dict[str, Any]:
    """What the folder's `generation_config.json` says about sampling, in SamplingParams' names; {} without the file.

    A field that is null says nothing, and `do_sample` is ignored, as vLLM does. The values are as they stand
    there: SamplingParams checks them. CheckpointError where the file is no JSON object.
    """
    file = folder / "generation_config.json"
    values = _read_json(file) if file.is_file() else {}
    return {ours: values[name] for name, ours in _GENERATION_DEFAULTS.items() if values.get(name) is not None}


def dtype_of(config: ModelConfig, requested: str = "auto") -> jnp.dtype:
    """The dtype to compute in: `auto` is what the checkpoint says, float32 where it is silent."""
    if requested == "auto":
        return jnp.dtype(config.dtype or "float32")
    if requested not in DTYPES:
        known = ("auto", *DTYPES)
        raise CheckpointError(
            f"dtype={requested!r} is not supported{nearest(requested, known)}; known: {', '.join(known)}"
        )
    return jnp.dtype(requested)


def load_hugging_face(
    folder: Path,
    *,
    dtype: Any = None,
    max_model_len: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Decoder:
    """Loads a folder's model in `dtype` (None: what the checkpoint says), split over `mesh` if one is given.

    Raises CheckpointError, naming file and field, for whatever does not fit; nothing is on a device then.
    """
    folder = Path(folder)
    config = read_config(folder, max_model_len=max_model_len)
    tensors = model_tensors(folder, config)
    dtype = dtype_of(config) if dtype is None else jnp.dtype(dtype)
    return build_decoder(config, dtype=dtype, read=lambda name: read_tensor(name, tensors[name], dtype), mesh=mesh)


def model_tensors(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors that the model is made of, checked: names, shapes, dtypes, and that a tied head is the embedding."""
    tensors = read_headers(folder)
    if _BARE_EMBED in tensors:  # a model without its head, stored by itself
        bare = lambda name: name != "lm_head.weight"
        tensors = {f"model.{name}" if bare(name) else name: tensor for name, tensor in tensors.items()}
    if config.tie_word_embeddings and "lm_head.weight" in tensors:
        _check_tied_head(tensors)
        del tensors["lm_head.weight"]
    check_tensors(config, {name: tensor.shape for name, tensor in tensors.items()}, str(folder))
    needed = {name: tensor for name, tensor in tensors.items() if not JUNK.search(name)}
    for name, tensor in needed.items():
        if tensor.dtype not in _STORED_DTYPES:
            raise UnsupportedModelError(
                f"{tensor.file}: tensor {name!r} has dtype {tensor.dtype}; known: {', '.join(_STORED_DTYPES)}"
            )
    return needed


def read_tensor(name: str, stored: StoredTensor, dtype: Any) -> np.ndarray:
    """The values of a tensor in `dtype`, rounded to nearest even; CheckpointError where float16 cannot hold them."""
    values = stored.read()
    with np.errstate(over="ignore"):
        cast = values.astype(dtype, copy=False)
    if cast.dtype == np.float16 and cast is not values and np.isinf(cast).any():
        largest = np.abs(values.astype(np.float32)).max()
        raise CheckpointError(
            f"{stored.file}: dtype='float16' cannot hold tensor {name!r}, which reaches {largest:g}; "
            "use bfloat16 or float32"
        )
    return cast


def _check_tied_head(tensors: dict[str, StoredTensor]) -> None:
    head, embed = tensors["lm_head.weight"], tensors.get("model.embed_tokens.weight")
    if embed is None or head.dtype not in _STORED_DTYPES or head[1:3] != embed[1:3]:
        equal = False
    else:
        equal = np.array_equal(head.read().view(np.uint8), embed.read().view(np.uint8))
    if not equal:
        raise CheckpointError(
            f"{head.file}: 'lm_head.weight' differs from 'model.embed_tokens.weight', but config.json has "
            "tie_word_embeddings=true; set it to false, or remove the tensor"
        )


def read_headers(folder: Path, name: str = "model.safetensors") -> dict[str, StoredTensor]:
    """All tensors of a folder, from the file of this name or the files of `model.safetensors.index.json`.

    Checks that every file is there, is as long as its header says, and holds what the index says.
    """
    single, index_file = folder / name, folder / "model.safetensors.index.json"
    if single.is_file():
        return _read_header(single)
    if not index_file.is_file():
        raise CheckpointError(f"{folder}: neither {single.name} nor {index_file.name} is there")
    index = _read_json(index_file).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{index_file}: weight_map={index!r}, but it must name a file for every tensor")
    tensors: dict[str, StoredTensor] = {}
    for file_name in dict.fromkeys(index.values()):
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(f"{index_file}: weight_map names {file_name!r}, which is no plain file name")
        header = _read_header(folder / file_name)
        if twice := header.keys() & tensors.keys():
            raise CheckpointError(f"{folder / file_name}: tensor {min(twice)!r} is also in another file")
        tensors |= header
    for tensor, file_name in index.items():
        if tensor not in tensors or tensors[tensor].file.name != file_name:
            raise CheckpointError(f"{index_file}: tensor {tensor!r} is not in {file_name}")
    return tensors


def holds_safetensors(folder: Path) -> bool:
    """Whether the folder holds tensors for `read_headers`."""
    return any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """The header of one safetensors file: 8 bytes of length, JSON, then the tensors' bytes."""
    if not file.is_file():
        raise CheckpointError(f"{file}: the file is missing")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        start = 8 + length
        if size < start:
            raise CheckpointError(f"{file}: truncated: {size} bytes, but the header alone ends at {start}")
        header = parse_json(stream.read(length), file)
    tensors = {}
    end = start
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            item_bytes, items = _ITEM_BYTES.get(dtype), math.prod(shape)
            fits = 0 <= first <= last and (item_bytes is None or last - first == items * item_bytes)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: the header's entry of tensor {name!r} is malformed") from error
        if not fits:
            raise CheckpointError(
                f"{file}: tensor {name!r} takes bytes {first} to {last}, which is not {dtype} {list(shape)}"
            )
        tensors[name] = StoredTensor(file, dtype, shape, start + first)
        end = max(end, start + last)
    if size != end:
        state = "truncated" if size < end else "longer than its header says"
        raise CheckpointError(f"{file}: {state}: {size} bytes, but its tensors end at {end}")
    return tensors


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise CheckpointError(f"{file}: the file is missing")
    return parse_json(file.read_bytes(), file)


def parse_json(content: bytes, file: Path) -> dict[str, Any]:
    """The JSON object that `file` contains; CheckpointError, naming the file, where it is none."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return value
