"""The lines of a task: JSONL, CSV, Parquet, or a Hugging Face dataset. Errors name the file and the line."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.extras import optional

if TYPE_CHECKING:
    from jaxserve.evaluation.config import DataConfig


class Row(NamedTuple):
    """A data line; `place` is where it stands, for messages: "file.jsonl: line 3"."""

    place: str
    values: dict[str, Any]


def read_rows(data: "DataConfig") -> list[Row]:
    """All lines, in order. ValueError, with file and line, for what cannot be read."""
    if data.dataset is not None:
        rows = list(_dataset(data))
    else:
        path = Path(data.path)
        kind = data.format or path.suffix.lower().lstrip(".")
        if kind not in _READERS:
            raise ValueError(f"{path}: its format must be named as one of {', '.join(_READERS)}, by suffix or `format`")
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
        try:
            rows = list(_READERS[kind](path))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8: {error}") from None
    if not rows:
        raise ValueError(f"{data.path or data.dataset}: it holds no lines")
    return rows


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}: line {number}"
            try:
                values = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{place}: no JSON: {error}") from None
            if not isinstance(values, dict):
                raise ValueError(f"{place}: it must hold an object, not {type(values).__name__}")
            yield Row(place, values)


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for values in reader:
                place = f"{path}: line {reader.line_num}"
                if None in values or None in values.values():
                    raise ValueError(f"{place}: it must have {len(reader.fieldnames)} fields, as the first line has")
                yield Row(place, values)
        except csv.Error as error:
            raise ValueError(f"{path}: line {reader.line_num}: no CSV: {error}") from None


def _parquet(path: Path) -> Iterator[Row]:
    parquet = optional("pyarrow.parquet", "evaluation", f"{path}: Parquet")
    try:
        table = parquet.read_table(path)
    except Exception as error:  # the library's own kinds
        raise ValueError(f"{path}: no Parquet: {error}") from None
    for number, values in enumerate(table.to_pylist(), 1):
        yield Row(f"{path}: row {number}", values)


def _dataset(data: "DataConfig") -> Iterator[Row]:
    """By name from the hub, or a folder that `datasets` has saved or can read."""
    datasets = optional("datasets", "datasets", f"dataset={data.dataset!r}")
    try:
        if (Path(data.dataset) / "dataset_dict.json").is_file() or (Path(data.dataset) / "state.json").is_file():
            found = datasets.load_from_disk(data.dataset)
            found = found[data.split] if isinstance(found, dict) else found
        else:
            found = datasets.load_dataset(data.dataset, data.subset, split=data.split)
    except Exception as error:  # the library's own kinds
        raise ValueError(f"dataset={data.dataset!r}: {error}") from None
    for number, values in enumerate(found, 1):
        yield Row(f"{data.dataset}, {data.split}: row {number}", dict(values))


_READERS = {"jsonl": _jsonl, "csv": _csv, "parquet": _parquet}
