"""Draft heads as folders: `config.json` and `model.safetensors`, under the names of published checkpoints.

    EAGLE-1   fc.weight, maybe fc.bias, layers.0.{self_attn,mlp}.*_proj.weight,
              layers.0.post_attention_layernorm.weight
    EAGLE-3   fc.weight, midlayer.{input_layernorm, hidden_norm, post_attention_layernorm, self_attn.*, mlp.*},
              norm.weight, lm_head.weight, d2t, t2d
both maybe with embed_tokens.weight; a head without lm_head.weight or embed_tokens.weight uses the target's. `d2t`
holds, for each token of a reduced draft vocabulary, how much larger its id is in the target's; `t2d`, the same as a
mask, is not needed. `layers.0.` may be written `midlayer.`, and names may begin with `model.`.

    Medusa    blocks.I.layers.J.{weight, bias}, lm_heads.I.weight, maybe token_map      (as vLLM names them)
              I.J.linear.{weight, bias}, I.L.weight, L being the number of layers       (as its authors do)
perhaps behind `medusa_heads.` or `medusa_head.`, perhaps in medusa_lm_head.safetensors. How many heads and layers there
are is what is stored; with `original_lm_head` in config.json lm_heads.0 or lm_head is that of all. `token_map` holds
the target's ids of a reduced vocabulary, in any order; a vocabulary head may hold them alone, in that order, or all.

Of any kind, a matrix in int8 comes with `NAME_scale`, a float32 for each of its rows.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save

from jaxserve.checkpoint.hugging_face import StoredTensor, parse_json, read_headers
from jaxserve.models.config import CheckpointError, ModelConfig, UnsupportedModelError
from jaxserve.models.draft_head import DraftHead, HeadConfig, build_head, head_leaves
from jaxserve.models.eagle import EagleConfig, EagleHead
from jaxserve.models.medusa import MedusaConfig
from jaxserve.models.registry import Fuse
from jaxserve.models.weights import JUNK, check_names
from jaxserve.validation import is_integer

_MAP = "t2d"
_MEDUSA_FILE = "medusa_lm_head.safetensors"
_OTHER_DTYPES = {"I8": np.int8, "I32": np.int32, "I64": np.int64, "BOOL": np.bool_}


def read_head(folder: Path, method: str, target: ModelConfig) -> HeadConfig:
    """What the head in a folder is, for this target. CheckpointError, naming file and field, for what does not fit."""
    values = _config(folder)
    medusa = method == "medusa"
    tensors = _medusa_tensors(folder, values) if medusa else _tensors(folder, _plain)
    read = _read_medusa if medusa else _read_eagle
    config = read(folder, method, values, tensors, target)
    _check(folder, config, tensors)
    return config


def _read_eagle(
    folder: Path, method: str, values: Mapping[str, Any], tensors: Mapping[str, np.ndarray], target: ModelConfig
) -> EagleConfig:
    third = method == "eagle3"
    layer = ModelConfig.from_hf({**values, "architectures": ["LlamaForCausalLM"]})
    layer = replace(layer, tie_word_embeddings=False, bos_token_id=None, eos_token_ids=(), dtype=None)  # the target's
    layer = replace(layer, windows=(_window(folder, values),))
    if layer.num_layers != 1:
        raise UnsupportedModelError(f"{folder}: config.json: num_hidden_layers={layer.num_layers}: a head has one")
    for name in ("norm_before_residual", "norm_before_fc"):
        if values.get(name):
            raise UnsupportedModelError(f"{folder}: config.json: {name}=true is not supported")
    width = layer.hidden_size
    shared = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in tensors]
    if width != target.hidden_size and (shared or not third):
        rule = f"the target's {target.hidden_size}" + (f" without {' and '.join(shared)}" if third else "")
        raise CheckpointError(f"{folder}: config.json: hidden_size={width}, but it must be {rule}")
    return EagleConfig(
        method=method,
        layer=layer,
        vocab_size=layer.vocab_size,
        target_hidden=target.hidden_size,
        aux_layers=_aux_layers(folder, values, target.num_layers) if third else (),
        draft_vocab=len(tensors["d2t"]) if "d2t" in tensors else None,
        fc_bias="fc.bias" in tensors and not third,
        own_embed="embed_tokens.weight" not in shared,
        own_head="lm_head.weight" not in shared,
    )


def _window(folder: Path, values: Mapping[str, Any]) -> int | None:
    """How many positions the head sees, its own among them. Configurations of Qwen name one that is not used."""
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    if window is not None and not (is_integer(window) and window >= 1):
        raise CheckpointError(f"{folder}: config.json: sliding_window={window!r}: must be a positive integer or null")
    return window


def _read_medusa(
    folder: Path, method: str, values: Mapping[str, Any], tensors: Mapping[str, np.ndarray], target: ModelConfig
) -> MedusaConfig:
    if values.get("logit_scale", 1) != 1:
        raise UnsupportedModelError(f"{folder}: config.json: logit_scale={values['logit_scale']} is not supported")
    numbers = lambda pattern: [int(found[1]) for name in tensors if (found := re.match(pattern, name))]
    return MedusaConfig(
        vocab_size=target.vocab_size,
        target_hidden=target.hidden_size,
        num_heads=1 + max(numbers(r"(?:blocks|lm_heads)\.(\d+)\."), default=0),
        num_layers=1 + max(numbers(r"blocks\.\d+\.layers\.(\d+)\."), default=-1),
        bias="blocks.0.layers.0.bias" in tensors,
        shared=bool(values.get("original_lm_head")),
        draft_vocab=len(tensors["token_map"]) if "token_map" in tensors else None,
    )


def load_head(folder: Path, config: HeadConfig, dtype: Any) -> DraftHead:
    """The head that `read_head` described, in `dtype`; int8 becomes that, too."""
    medusa = isinstance(config, MedusaConfig)
    tensors = _medusa_tensors(folder, _config(folder)) if medusa else _tensors(folder, _plain)

    def read(name: str) -> np.ndarray:
        scale = tensors.get(name + "_scale")
        return tensors[name] if scale is None else tensors[name] * scale[:, None]

    return build_head(config, dtype=dtype, read=read)


def save_head(head: EagleHead, folder: Path, *, int8: bool = True) -> None:
    """Write an EAGLE head's folder, as `read_head` and `load_head` read it. With `int8` matrices have a scale a row."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for leaf, value in zip(head_leaves(head.config), jax.tree.leaves(nnx.state(head)), strict=True):
        for name, tensor in _stored(leaf, np.asarray(value)).items():
            if int8 and tensor.ndim == 2:
                scale = np.maximum(np.abs(tensor).max(axis=1), 1e-30).astype(np.float32) / 127
                tensors[name + "_scale"] = scale
                tensor = np.round(tensor / scale[:, None]).astype(np.int8)
            tensors[name] = np.ascontiguousarray(tensor)
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(_describe(head.config), indent=2) + "\n", encoding="utf-8")


def _stored(leaf, value: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors behind an array: `fuse_tensors` the other way round."""
    if leaf.path == "token_ids":
        return {"d2t": value.astype(np.int64) - np.arange(len(value))}
    value, names, shapes = value.astype(np.float32), list(leaf.tensors), list(leaf.tensors.values())
    match leaf.fuse:
        case Fuse.QKV | Fuse.QKV_BIAS:
            wide = value.transpose(1, 2, 0) if leaf.fuse is Fuse.QKV else value[..., None]
            groups = wide.shape[0]
            cuts = np.cumsum([shape[0] // groups for shape in shapes])[:-1]
            parts = [part.reshape(shape) for part, shape in zip(np.split(wide, cuts, axis=1), shapes, strict=True)]
        case Fuse.OUT:
            parts = [value.reshape(-1, value.shape[-1]).T]
        case Fuse.GATE_UP:
            parts = list(value.transpose(1, 2, 0))
        case Fuse.GATE_UP_BIAS:
            parts = list(value)
        case Fuse.TRANSPOSE:
            parts = [value.T]
        case _:
            parts = [value]
    return dict(zip(names, parts, strict=True))


def _describe(config: EagleConfig) -> dict[str, Any]:
    layer = config.layer
    described = {
        "architectures": ["LlamaForCausalLMEagle3" if config.method == "eagle3" else "EagleLlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": layer.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope_theta,
        "max_position_embeddings": layer.max_position_embeddings,
        "sliding_window": layer.windows[0],
    }
    if config.draft_vocab is not None:
        described["draft_vocab_size"] = config.draft_vocab
    if config.aux_layers:
        described["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(config.aux_layers)}
    return described


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{file}: the file is missing")
    return parse_json(file.read_bytes(), file)


def _tensors(folder: Path, plain: Callable[[str], str]) -> dict[str, np.ndarray]:
    """By name as `plain` makes it the tensors of a folder, but for those that a head does not need."""
    named = folder / _MEDUSA_FILE
    single = named if named.is_file() else folder / "model.safetensors"
    pickled = sorted([*folder.glob("*.pt"), *folder.glob("*.bin")])
    if pickled and not any(folder.glob("*.safetensors*")):
        how = "safetensors.torch.save_file(torch.load(FILE, weights_only=True, map_location='cpu'), OTHER)"
        raise UnsupportedModelError(f"{pickled[0]}: only safetensors files are read; convert it: {how}")
    headers = {plain(name): (name, stored) for name, stored in read_headers(folder, single.name).items()}
    return {
        ours: _read(name, stored) for ours, (name, stored) in headers.items() if ours != _MAP and not JUNK.search(name)
    }


def _medusa_tensors(folder: Path, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """As `_tensors`, the `token_map` ascending and the rows of the vocabulary heads those of its tokens."""
    tensors = _tensors(folder, _plain_medusa)
    if values.get("original_lm_head"):
        shared = tensors.pop("lm_head.weight", None)
        tensors = {name: value for name, value in tensors.items() if not re.match(r"lm_heads\.[1-9]", name)}
        tensors |= {} if shared is None else {"lm_heads.0.weight": shared}
    if (ids := tensors.get("token_map")) is not None:
        order = np.argsort(ids, kind="stable")
        tensors["token_map"] = ids[order]
        for name, value in tensors.items():
            if name.startswith("lm_heads."):
                tensors[name] = value[order] if len(value) == len(ids) else np.take(value, ids[order], 0, mode="clip")
    return tensors


def _read(name: str, stored: StoredTensor) -> np.ndarray:
    """A read-only view of the file."""
    if stored.dtype in ("F32", "F16", "BF16"):
        return stored.read()
    if stored.dtype not in _OTHER_DTYPES:
        raise UnsupportedModelError(
            f"{stored.file}: tensor {name!r} has dtype {stored.dtype}, which a head cannot have"
        )
    dtype = _OTHER_DTYPES[stored.dtype]
    return np.memmap(stored.file, dtype=dtype, mode="r", offset=stored.offset, shape=stored.shape)


def _plain(name: str) -> str:
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def _plain_medusa(name: str) -> str:
    name = re.sub(r"^medusa_heads?\.", "", name)
    name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
    return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)


def _aux_layers(folder: Path, values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """As vLLM reads them: layer i stands for what comes into it."""
    nested = values.get("eagle_config") or {}
    name = "eagle_aux_hidden_state_layer_ids"
    given = nested.get(name, values.get(name))
    layers = (2, num_layers // 2, num_layers - 3) if given is None else tuple(given)
    if not layers or not all(isinstance(i, int) and 0 <= i <= num_layers for i in layers):
        rule = f"it must name layers from 0 to {num_layers}"
        raise CheckpointError(f"{folder}: config.json: {name}={list(layers)}, but {rule}")
    return layers


def _check(folder: Path, config: HeadConfig, tensors: Mapping[str, np.ndarray]) -> None:
    """CheckpointError unless names, shapes, scales and the draft vocabulary fit."""
    stored = {name: value.shape for name, value in tensors.items()}
    needed = {name: shape for leaf in head_leaves(config) for name, shape in leaf.tensors.items()}
    needed |= {name + "_scale": value.shape[:1] for name, value in sorted(tensors.items()) if value.dtype == np.int8}
    check_names(needed, stored, str(folder), f"a head for the method {config.method!r}")
    for name, first in (("d2t", np.arange(config.draft_vocab or 0)), ("token_map", 0)):
        if name not in tensors:
            continue
        ids = tensors[name] + first
        if not ((np.diff(ids) > 0).all() and ids[0] >= 0 and ids[-1] < config.vocab_size):
            rule = "ascend" if name == "d2t" else "be different ones"
            raise CheckpointError(f"{folder}: {name}: the ids that it leads to must {rule} below {config.vocab_size}")
