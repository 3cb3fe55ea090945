"""The result file of one task and one model: a line per item, appended as items finish, in item order at the end.

A line is final when its newline is there. There is no header and no journal, so a process may be killed at any moment:
the next one drops a torn last line and computes what is missing.
"""

import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SYNC_SECONDS = 1.0  # what a machine that loses power may lose


class ResultsFile:
    """Appends to one file, for one process at a time.

    `identities` say for each item what its line must begin with ("item" among it); a line of another item, prompt
    or setting makes the constructor raise ValueError with its number. Lines that are there are in `lines`, by item.
    """

    def __init__(self, path: Path, identities: Sequence[Mapping[str, Any]]):
        self.path, self._identities = path, identities
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        self._synced = time.monotonic()
        self._encoded: dict[int, bytes] = {}
        self.lines: dict[int, dict[str, Any]] = {}
        try:
            self._lock()
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
        place = f"{self.path}: line {number}"
        try:
            values = json.loads(line)
            item = values["item"]
            expected = self._identities[item] if item >= 0 else {}
        except (ValueError, KeyError, TypeError, IndexError):
            raise ValueError(f"{place}: this is no line of this job's results: {_ANOTHER}") from None
        if item in self.lines:
            raise ValueError(f"{place}: item {item} stands twice: {_ANOTHER}")
        wrong = [name for name, value in expected.items() if values.get(name) != value]
        if wrong or not expected:
            what = "of another prompt" if "prompt_sha256" in wrong else "of other settings or another model"
            raise ValueError(f"{place}: item {item} is {what}: {_ANOTHER}")
        self.lines[item], self._encoded[item] = values, line

    @property
    def missing(self) -> list[int]:
        """The items without a line, in order."""
        return [item for item in range(len(self._identities)) if item not in self.lines]

    def append(self, line: dict[str, Any]) -> None:
        """Write an item's final line."""
        encoded = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        self._file.write(encoded)
        self._file.flush()
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()
        self.lines[line["item"]], self._encoded[line["item"]] = line, encoded

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


_ANOTHER = "choose another output folder, or start over with --overwrite"


def read_results(path: Path) -> list[dict[str, Any]]:
    """The lines of a finished file in item order; ValueError for a file that is none."""
    lines = []
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    for number, text in enumerate(content.splitlines(), 1):
        try:
            line = json.loads(text)
            lines.append((line["item"], line))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: line {number}: this is no line of results") from None
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]
