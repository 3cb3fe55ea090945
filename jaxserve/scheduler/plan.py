"""What one step computes, as the scheduler plans it. Knows no JAX."""

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.request import Request


class PlanEntry(NamedTuple):
    """`count` tokens of a request from position `start` on; `sample`: the last of them yields a new token.

    Behind them stand up to `drafts` draft tokens, each of which yields one more if it is accepted. While drafts of the
    step before are being verified only the device knows the start: it lies between `start` and `latest`.
    """

    request: Request
    slot: int
    start: int
    count: int
    sample: bool
    drafts: int
    latest: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A slot to fill before the step: the tokens known so far and the pages of all of them."""

    request: Request
    slot: int
    token_ids: list[int]
    pages: list[int]
    num_computed: int
    write_start: int


@dataclass(slots=True)
class StepPlan:
    """One step. `copies` are (from page, to page), `new_pages` are (slot, index in its table, page).

    `num_tokens` (query rows), `num_sampled` (rows of the head), `num_drafting` (entries with drafts), `only_greedy`
    (every token to be sampled is just the largest logit's), `constrained` (some may be only what the form of the output
    allows) and `wants_rows` (some request wants log-probabilities besides those that the head gives) are those of the
    entries.
    """

    entries: list[PlanEntry] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    new_pages: list[tuple[int, int, int]] = field(default_factory=list)
    num_tokens: int = 0
    num_sampled: int = 0
    num_drafting: int = 0
    only_greedy: bool = True
    constrained: bool = False
    wants_rows: bool = False

    def add(self, entry: PlanEntry) -> None:
        request, _, _, count, sample, drafts, _ = entry
        self.entries.append(entry)
        self.num_tokens += count + drafts
        if sample:
            self.num_sampled += 1 + drafts
            self.num_drafting += drafts > 0
            if not request.only_greedy:
                self.only_greedy = False
                if request.constraint is not None:
                    self.constrained = True
        if request.wants_rows:
            self.wants_rows = True

    @property
    def head_kind(self) -> dict[str, bool]:
        """Which head samples the rows, as the runner is asked for it."""
        return {"greedy": self.only_greedy, "masked": self.constrained}

    def __bool__(self) -> bool:
        return bool(self.entries)
