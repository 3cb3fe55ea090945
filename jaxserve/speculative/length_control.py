"""How many draft tokens a request gets in a step. Host side; knows no JAX.

A step takes what its bucket of planned tokens takes, and more for each row that is really computed (a planned draft may
not exist). Both are measured. The i-th draft of a request whose drafts exist with probability p and are accepted with
probability a yields p * a**i. So for each bucket there is a best choice, the drafts that yield most a row until the
bucket is full, and the step takes the bucket that promises most tokens a second. Under load that is the smallest one
and nobody drafts; when the load falls drafts are tried again.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from jaxserve.config import SpeculativeConfig
from jaxserve.request import Request
from jaxserve.speculative.acceptance import FORGET_ALL, NO_DRAFT, Acceptance

LEARN = 0.1  # weight of a step in what its kind takes
DRIFT = 0.05  # and in what the others do: contexts and the machine change for all
FORGET_SLOPE = 0.97  # weight of an earlier step in the cost of a row
STALE = 300  # steps after which a kind that was not seen counts as unknown, and may be tried again
ASSUMED_SHARE = 0.1  # of a row's share of its step: what one more costs, while that is not known
ASSUMED_SPREAD = 0.25  # variance of the rows (squared) up to which the assumption counts more than what was seen
MARGIN = 0.1  # of the rate: what drafts that take a larger bucket must promise above none, the best promise being rosy
PROBE_SHARE = 0.01  # of the time since the last such step: what one takes longer in which requests try a draft
PROBE_AFTER = 24  # steps without a draft after which a request tries one


class Kind(NamedTuple):
    """What steps that take about as long have in common."""

    bucket: int
    drafts: bool


@dataclass(slots=True)
class Level:
    """Means of the recent steps of a kind, and how many steps ago the last was."""

    rows: int | float
    seconds: float
    age: int = 0


class StepCost:
    """Seconds of a step in which every row decodes, by its bucket, with or without drafts (to propose any takes time of
    its own), and by its rows.

    `buckets` are sizes of planned tokens, ascending; a number beyond them is a bucket of its own.
    """

    def __init__(self, buckets: Sequence[int] = ()):
        self._buckets = tuple(buckets)
        self._levels: dict[Kind, Level] = {}
        self._last: Kind | None = None
        self._spread = self._together = 0.0  # sums of (rows - mean)**2 and (rows - mean) * (seconds - mean)

    def kind(self, running: int, drafts: int) -> Kind:
        """Of a step for so many requests with so many planned drafts."""
        index = bisect_left(self._buckets, running + drafts)
        return Kind(self._buckets[index] if index < len(self._buckets) else running + drafts, drafts > 0)

    def between(self, least: int, most: int) -> list[int]:
        """The buckets that hold `least` to `most` planned tokens, ascending; the last is cut to `most`."""
        return [*(size for size in self._buckets if least <= size < most), most]

    def observe(self, running: int, drafts: int, rows: int, seconds: float) -> None:
        kind = self.kind(running, drafts)
        level = self._levels.get(kind)
        if level is None:
            self._levels[kind] = level = Level(rows, seconds)
        drift = min(max(seconds / self.seconds(kind, rows), 0.5), 2.0) ** DRIFT
        more, longer = rows - level.rows, seconds - level.seconds
        forget = FORGET_SLOPE ** min(more * more, 1.0)  # steps of equal rows tell nothing, and nothing is forgotten
        self._spread = forget * self._spread + more * more
        self._together = forget * self._together + more * longer
        self._last = kind
        level.rows, level.seconds = level.rows + LEARN * more, level.seconds + LEARN * longer
        level.age = 0
        for other, its in list(self._levels.items()):
            if its is not level:
                its.seconds, its.age = its.seconds * drift, its.age + 1
                if its.age > STALE:
                    del self._levels[other]

    def row_seconds(self, kind: Kind) -> float:
        """What one more row takes in a step of a kind that was seen. Where the rows hardly varied: what lies between it
        and the nearest bucket, or a small share of the step, so that drafts are tried."""
        level = self._levels[kind]
        others = [known for known in self._levels if known.bucket != kind.bucket]
        assumed = ASSUMED_SHARE * level.seconds / max(level.rows, 1)
        if others:
            other = self._levels[min(others, key=lambda known: abs(known.bucket - kind.bucket))]
            if abs(other.rows - level.rows) >= 1:
                assumed = max((other.seconds - level.seconds) / (other.rows - level.rows), 0.0)
        return max(self._together + ASSUMED_SPREAD * assumed, 0.0) / (self._spread + ASSUMED_SPREAD)

    def seconds(self, kind: Kind, rows: int | float) -> float:
        """Of a kind that was not seen yet the least that it may be, so that it is tried where that would be good."""
        level = self._levels.get(kind)
        if level is not None:
            return max(level.seconds + self.row_seconds(kind) * (rows - level.rows), 0.1 * level.seconds)
        if not self._levels:
            return 1 + ASSUMED_SHARE * rows
        nearest = min(self._levels, key=lambda known: (abs(known.bucket - kind.bucket), known.drafts != kind.drafts))
        size, near = kind.bucket, nearest.bucket
        share = size / near if size < near else 1 + ASSUMED_SHARE * (1 - near / size)
        if nearest.drafts > kind.drafts:
            share *= 1 - ASSUMED_SHARE
        return share * self._levels[nearest].seconds

    def row_price(self, tokens_a_second: float) -> float:
        """The tokens that are made in the time of one more row, after the last step."""
        return ASSUMED_SHARE if self._last is None else self.row_seconds(self._last) * tokens_a_second


@dataclass(slots=True)
class Counts:
    """What `stats` reports. A draft is what is proposed for one request in one step."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)


class Extension(NamedTuple):
    """One request's drafts from one prepared length to the next: how many tokens they yield a row, on the average, and
    how probably they exist."""

    tokens_a_row: float
    index: int
    length: int
    rows: int
    existence: float


class LengthController:
    """Chooses draft lengths (the scheduler's `DraftLengths`) and counts what became of the drafts."""

    def __init__(self, config: SpeculativeConfig, buckets: Sequence[int] = ()):
        most = config.num_speculative_tokens
        self._fixed = config.length_control == "fixed"
        lengths = (most,) if self._fixed else tuple(k for k in (*config.draft_lengths, most) if 0 < k <= most)
        self._lengths = tuple(dict.fromkeys((0, *lengths)))
        self._cost = StepCost(buckets)
        self._all = Acceptance(accepted=1.0, tried=2.0, found=1.0, asked=1.0, forget=FORGET_ALL)
        self._rate = 0.0  # tokens a second that the last step promised
        self._since_probe = 0
        self.counts = Counts(accepted_at=[0] * most)
        self.last_mean_length = 0.0

    def choose(self, decoding: Sequence[Request], room: int) -> list[int]:
        """A length for each request; where the room does not suffice for all, the surest drafts come first."""
        lengths = [0] * len(decoding)
        extensions = self._extensions(decoding)
        for extension in extensions[: self._how_many(extensions, len(decoding), room)]:
            lengths[extension.index] = extension.length
        if not self._fixed:
            self._probe(decoding, lengths, room)
        self.last_mean_length = sum(lengths) / max(len(lengths), 1)
        return lengths

    def _extensions(self, decoding: Sequence[Request]) -> list[Extension]:
        """From each prepared length to the next, for every request, those that yield most a row first. Such as do not
        pay for their rows are left out."""
        prior, exist = self._all.rate(0.5), self._all.existence(1.0)
        price = 0.0 if self._fixed else self._cost.row_price(self._rate)
        found = []
        for index, request in enumerate(decoding):
            if not request.params.speculative:
                continue
            rate, share = request.draft_acceptance.rate(prior), request.draft_acceptance.existence(exist)
            for shorter, longer in pairwise(self._lengths):
                rows = longer - shorter
                tokens = sum(rate**place for place in range(shorter + 1, longer + 1))
                if tokens <= rows * price and not self._fixed:
                    break
                found.append(Extension(share * tokens / rows, index, longer, rows, share))
        return sorted(found, key=lambda extension: -extension.tokens_a_row)

    def _how_many(self, extensions: Sequence[Extension], running: int, room: int) -> int:
        """How many of the extensions make the fastest step."""
        most = bisect_right(list(accumulate(extension.rows for extension in extensions)), room)
        if self._fixed:
            return most
        alone = self._cost.kind(running, 0)
        best, best_rate = 0, running / self._cost.seconds(alone, running)
        least = best_rate * (1 + MARGIN)
        planned, rows, tokens, taken = running, float(running), float(running), 0
        for size in self._cost.between(running, running + room):
            while taken < most and planned + extensions[taken].rows <= size:
                planned += extensions[taken].rows
                rows += extensions[taken].rows * extensions[taken].existence
                tokens += extensions[taken].rows * extensions[taken].tokens_a_row
                taken += 1
            kind = self._cost.kind(running, planned - running)
            rate = tokens / self._cost.seconds(kind, rows)
            if rate > best_rate and (kind.bucket == alone.bucket or rate > least):
                best, best_rate = taken, rate
            if taken == most:
                break
        self._rate = best_rate
        return best

    def _probe(self, decoding: Sequence[Request], lengths: list[int], room: int) -> None:
        """Now and then give those that have had no draft for long a short one, if drafts that are right would pay. All
        of them in one step: it may be one of a larger bucket."""
        idle = []
        for index, (request, length) in enumerate(zip(decoding, lengths, strict=True)):
            state = request.draft_acceptance
            state.idle_steps = 0 if length else state.idle_steps + 1
            if not length:
                state.fade()
            if state.idle_steps >= PROBE_AFTER and request.params.speculative:
                idle.append(index)
        self._since_probe += 1
        if not idle or self._since_probe < PROBE_AFTER:
            return
        running, drafts, short = len(decoding), sum(lengths), self._lengths[1]
        idle = idle[: (room - drafts) // short]
        more = short * len(idle)
        seconds = lambda drafts: self._cost.seconds(self._cost.kind(running, drafts), running + drafts)
        longer = seconds(drafts + more) / seconds(drafts)
        if running + more > running * longer and (longer - 1) < PROBE_SHARE * self._since_probe:
            self._since_probe = 0
            for index in idle:
                lengths[index], decoding[index].draft_acceptance.idle_steps = short, 0

    def observe(self, request: Request, sampled: Sequence[int]) -> int:
        """What became of a request's drafts, from what was reported for the rows of its run.

        Returns how many of the rows count: one more than the accepted drafts.
        """
        valid = 1
        while valid < len(sampled) and sampled[valid] >= 0:
            valid += 1
        accepted, drafted = valid - 1, sum(token != NO_DRAFT for token in sampled[1:])
        for acceptance in (request.draft_acceptance, self._all) if len(sampled) > 1 else ():
            acceptance.observe(drafted, accepted)
        if drafted:
            self.counts.drafts += 1
            self.counts.draft_tokens += drafted
            self.counts.accepted_tokens += accepted
            for place in range(accepted):
                self.counts.accepted_at[place] += 1
        return valid

    def observe_step(self, running: int, drafts: int, rows: int, seconds: float) -> None:
        """A step of so many requests, all of them decoding, and planned drafts computed `rows` rows in so many
        seconds."""
        self._cost.observe(running, drafts, rows, seconds)

    def reset_counts(self) -> None:
        self.counts = Counts(accepted_at=[0] * len(self.counts.accepted_at))

    def stats(self) -> dict[str, int | float]:
        counts = self.counts
        return {
            "spec_num_drafts": counts.drafts,
            "spec_num_draft_tokens": counts.draft_tokens,
            "spec_num_accepted_tokens": counts.accepted_tokens,
            "spec_mean_accepted_length": 1 + counts.accepted_tokens / max(counts.drafts, 1),
            "spec_mean_draft_length": self.last_mean_length,
            **{f"spec_num_accepted_tokens_pos_{i}": count for i, count in enumerate(counts.accepted_at)},
        }
