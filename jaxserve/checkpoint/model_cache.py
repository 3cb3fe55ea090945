"""Models that are converted once and kept in the cache folder, made atomically and by one process at a time."""

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from jaxserve.checkpoint.gguf import convert_gguf
from jaxserve.config import cache_folder

_CONVERSION = "1"  # changes when the conversion does


def converted_gguf(path: Path) -> Path:
    """The folder in Hugging Face's layout of a GGUF file, converted when it is not there yet.

    Kept by the file's place, size and time of change. Raises as `convert_gguf`.
    """
    path = path.absolute()
    stat = path.stat()
    identity = f"{_CONVERSION} {path} {stat.st_size} {stat.st_mtime_ns}"
    folder = cache_folder() / "gguf" / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    with workspace() as scratch:
        if not folder.is_dir():
            say(f"converting {path} to {folder} (once)")
            convert_gguf(path, scratch / folder.name)
            folder.parent.mkdir(exist_ok=True)
            publish(scratch / folder.name, folder)
    return folder


@contextmanager
def workspace() -> Iterator[Path]:
    """A folder to work in, for one process at a time; what killed ones left behind is removed."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "models.lock"):
        for leftover in cache.glob("unfinished-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=cache) as scratch:
            yield Path(scratch)


def publish(finished: Path, place: Path) -> None:
    """Give a finished file or folder its name, in one step. If another process was faster, theirs stays."""
    try:
        finished.rename(place)
    except OSError:
        if not place.exists():
            raise


def say(text: str) -> None:
    print(f"jaxserve: {text}", file=sys.stderr, flush=True)
