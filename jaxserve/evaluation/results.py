"""The result file of one task and one model: a line per item, appended as items finish, in item order at the end.

A line is final when its newline is there. There is no header and no journal, so a process may be killed at any moment:
the next one drops a torn last line and computes what is missing.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.validation import is_integer, lone_surrogate

SYNC_SECONDS = 1.0  # what a machine that loses power may lose


class ResultsFile:
    """Appends to one file, for one process at a time.

    `count` items have a line each; `item_of` gives the number of a line's item and raises ValueError for a line that
    is not of this job, which the constructor reports with file and line. Lines that are there are in `lines`, by item;
    `overwrite` drops them.
    """

    def __init__(self, path: Path, count: int, item_of: Callable[[dict[str, Any]], int], *, overwrite: bool = False):
        self.path, self._count, self._item_of = path, count, item_of
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        self._synced = time.monotonic()
        self._encoded: dict[int, bytes] = {}
        self.lines: dict[int, dict[str, Any]] = {}
        try:
            self._lock()
            if overwrite:
                self._file.truncate(0)
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{self.path}: another process is writing it") from None

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
        for number, line in enumerate(content[:whole].splitlines(keepends=True), 1):
            self._note(number, line)

    def _note(self, number: int, line: bytes) -> None:
        try:
            try:
                values = json.loads(line)
                item = self._item_of(values)
            except (KeyError, TypeError):
                raise ValueError("this is no line of this job's results") from None
            if item in self.lines:
                raise ValueError(f"item {item} stands twice")
        except ValueError as error:
            hint = "choose another output, or start over with --overwrite"
            raise ValueError(f"{self.path}: line {number}: {error}: {hint}") from None
        self.lines[item], self._encoded[item] = values, line

    @property
    def missing(self) -> list[int]:
        """The items without a line, in order."""
        return [item for item in range(self._count) if item not in self.lines]

    def append(self, item: int, line: dict[str, Any]) -> None:
        """Write an item's final line."""
        text = json.dumps(line, ensure_ascii=False)
        if lone_surrogate(text) is not None:  # from the data: written as JSON's escape
            text = json.dumps(line)
        encoded = text.encode() + b"\n"
        self._file.write(encoded)
        self._file.flush()
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()
        self.lines[item], self._encoded[item] = line, encoded

    def finish(self) -> None:
        """Put the lines in item order, atomically. All must be there."""
        assert not self.missing
        ordered = b"".join(self._encoded[item] for item in sorted(self._encoded))
        self._file.seek(0)
        if self._file.read() == ordered:
            return
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("wb") as file:
            file.write(ordered)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)

    def close(self) -> None:
        self._file.close()


def item_by_identity(identities: Sequence[Mapping[str, Any]]) -> Callable[[dict[str, Any]], int]:
    """The `item_of` of items whose lines begin with these values, "item" and "prompt_sha256" among them."""

    def item_of(line: dict[str, Any]) -> int:
        item = line["item"]
        if not is_integer(item) or not 0 <= item < len(identities):
            raise ValueError(f"item {item!r}: there are {len(identities)} items")
        wrong = [name for name, value in identities[item].items() if line.get(name) != value]
        if wrong:
            what = "of another prompt" if "prompt_sha256" in wrong else "of other settings or another model"
            raise ValueError(f"item {item} is {what}")
        return item

    return item_of


def read_results(path: Path) -> list[dict[str, Any]]:
    """The lines of a finished file in item order; ValueError for a file that is none."""
    lines = []
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    for number, text in enumerate(content.removesuffix("\n").split("\n"), 1):
        try:
            line = json.loads(text)
            lines.append((line["item"], line))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: line {number}: this is no line of results") from None
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]
