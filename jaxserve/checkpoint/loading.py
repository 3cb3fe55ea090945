"""From the name of a model to its folder, and from a folder to a filled Decoder, whatever format it holds."""

from pathlib import Path
from typing import Any

import jax

from jaxserve.checkpoint.demo_model import demo_model_folder
from jaxserve.checkpoint.hugging_face import load_hugging_face, resolve_model
from jaxserve.checkpoint.model_cache import converted_gguf
from jaxserve.checkpoint.orbax import holds_orbax, load_orbax
from jaxserve.models.decoder import Decoder


def model_folder(name: str | Path | None) -> Path:
    """The folder behind a name: a folder, a GGUF file (converted once), a hub id, or None for the demo model.

    Raises CheckpointError, GGUFError or DemoModelError where there is none to be had.
    """
    if name is None:
        return demo_model_folder()
    path = Path(name).expanduser()
    return converted_gguf(path) if path.suffix == ".gguf" and path.is_file() else resolve_model(str(name))


def load_decoder(
    folder: Path,
    *,
    dtype: Any = None,
    max_model_len: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Decoder:
    """A folder's model in `dtype` (None: what the checkpoint says), split over `mesh` if one is given.

    The Orbax tree is taken where the folder holds one, the safetensors files otherwise: the values are the same.
    Raises CheckpointError, naming file and field, before anything is on a device.
    """
    load = load_orbax if holds_orbax(folder) else load_hugging_face
    return load(folder, dtype=dtype, max_model_len=max_model_len, mesh=mesh)
