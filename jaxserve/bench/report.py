"""Rows of a check, printed as they come, then as one table and as JSON. Knows no JAX."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One figure or one verdict. `ok` is None where nothing is claimed; `share` is the part of a floor or a peer."""

    section: str
    name: str
    value: float | str
    unit: str = ""
    share: float | None = None
    ok: bool | None = None

    def cells(self) -> tuple[str, ...]:
        value = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        verdict = {None: "", True: "ok", False: "FAILED"}[self.ok]
        return self.section, self.name, value, self.unit, "" if self.share is None else f"{self.share:.0%}", verdict


class Report:
    """Collects rows within a time limit; a section that fails is a row, not the end."""

    def __init__(self, limit_s: float):
        self.rows: list[Row] = []
        self.started = time.monotonic()
        self.limit_s = limit_s
        self._section, self._needed = "", True

    def has_time(self, name: str) -> bool:
        """Whether something can still start; if not, that is a row, which has failed if its section is needed."""
        if time.monotonic() - self.started < self.limit_s:
            return True
        self.add(name, f"not run: out of time after {self.limit_s:.0f} s", ok=False if self._needed else None)
        return False

    def section(self, name: str, run: Callable[["Report"], None], *, needed: bool = True) -> None:
        """Run a section if there is time for it; what it raises becomes a failed row. One that is not `needed` may find
        no time, or not enough."""
        self._section, self._needed = name, needed
        started = time.monotonic()
        if not self.has_time("all of it"):
            return
        try:
            run(self)
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            self.add("stopped", f"{type(error).__name__}: {first[:300]}", ok=False)
        self.add("took", time.monotonic() - started, "s")

    def add(self, name: str, value: float | str, unit: str = "", **more) -> None:
        row = Row(self._section, name, value, unit, **more)
        self.rows.append(row)
        print(" | ".join(filter(None, row.cells())), flush=True)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.ok is False]

    def finish(self, json_path: Path | None = None) -> int:
        """Print the table, write the JSON, return the exit status."""
        print("\n| section | what | value | unit | share | |\n|---|---|---|---|---|---|")
        for row in self.rows:
            print("| " + " | ".join(row.cells()) + " |")
        print(f"\n{len(self.rows) - len(self.failed)} passed, {len(self.failed)} failed")
        sys.stdout.flush()
        if json_path is not None:
            json_path.write_text(json.dumps([asdict(row) for row in self.rows], indent=1) + "\n")
        return 1 if self.failed else 0
