"""How many draft tokens a request gets in a step. Host side; knows no JAX.

A row of the step costs time, and time is worth tokens: at R tokens a second and c seconds a row, a draft row must yield
R * c tokens to pay. The i-th draft of a request whose drafts are accepted with probability a yields a**i. So each
request gets the length k of the prepared ones that maximises a + a**2 + ... + a**k - k * R * c (maximising a ratio
by its current value: Dinkelbach, 1967). R and c come from the steps themselves: under load R * c nears 1 and nobody
drafts, and when it falls they begin again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.config import SpeculativeConfig
from jaxserve.request import Request
from jaxserve.speculative.acceptance import FORGET_ALL, NO_DRAFT, Acceptance

FORGET_COST = 0.97  # weight of an earlier step in the cost of a row
FORGET_RATE = 0.9  # and in the rate, which changes with the load
ASSUMED_SHARE = 0.1  # of a row's share of its step: what one more costs, while that is not known
ASSUMED_SPREAD = 0.25  # variance of the rows (squared) up to which the assumption counts more than what was seen
PROBE_AFTER = 24  # steps without a draft after which a request tries one


class StepCost:
    """seconds = a + c * rows, and tokens a second, of recent steps in which every row decodes."""

    def __init__(self):
        self._line = [0.0] * 5  # sums of 1, rows, seconds, rows², rows * seconds
        self._rate = [0.0] * 2  # of tokens, seconds

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        line, rate = (1.0, rows, seconds, rows * rows, rows * seconds), (tokens, seconds)
        self._line = [FORGET_COST * old + new for old, new in zip(self._line, line, strict=True)]
        self._rate = [FORGET_RATE * old + new for old, new in zip(self._rate, rate, strict=True)]

    @property
    def tokens_per_row_time(self) -> float:
        """The tokens that the engine makes in the time of one more row."""
        if not self._line[0]:
            return ASSUMED_SHARE
        mean_rows, mean_seconds, squares, products = (total / self._line[0] for total in self._line[1:])
        spread, together = squares - mean_rows**2, products - mean_rows * mean_seconds
        # Where the rows hardly varied nothing is known: a small cost is assumed, so that drafts are tried.
        assumed = ASSUMED_SHARE * mean_seconds / mean_rows
        row_seconds = max(together + ASSUMED_SPREAD * assumed, 0.0) / (spread + ASSUMED_SPREAD)
        return row_seconds * self._rate[0] / self._rate[1]


@dataclass(slots=True)
class Counts:
    """What `stats` reports. A draft is what is proposed for one request in one step."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)


class LengthController:
    """Chooses draft lengths (the scheduler's `DraftLengths`) and counts what became of the drafts."""

    def __init__(self, config: SpeculativeConfig):
        most = config.num_speculative_tokens
        self._fixed = config.length_control == "fixed"
        self._lengths = (0, most) if self._fixed else tuple(k for k in (*config.draft_lengths, most) if k <= most)
        self._cost = StepCost()
        self._all = Acceptance(accepted=1.0, tried=2.0, forget=FORGET_ALL)
        self.counts = Counts(accepted_at=[0] * most)
        self.last_mean_length = 0.0

    def choose(self, decoding: Sequence[Request], room: int) -> list[int]:
        """A length for each request; where the room does not suffice for all, the surest drafts come first."""
        prior, price = self._all.rate(0.5), self._cost.tokens_per_row_time
        rates = [request.draft_acceptance.rate(prior) for request in decoding]
        lengths = [0] * len(decoding)
        for index in sorted(range(len(decoding)), key=lambda index: -rates[index]):
            request = decoding[index]
            if request.params.speculative and room > 0:
                length = self._length(request, rates[index], price)
                while length > room:
                    length = max(shorter for shorter in self._lengths if shorter < length)
                lengths[index] = length
                room -= length
        self.last_mean_length = sum(lengths) / max(len(lengths), 1)
        return lengths

    def _length(self, request: Request, rate: float, price: float) -> int:
        if self._fixed:
            return self._lengths[-1]
        best, most = 0, 0.0
        for length in self._lengths:
            gain = sum(rate**place for place in range(1, length + 1)) - length * price
            if gain > most:
                best, most = length, gain
        state = request.draft_acceptance
        state.idle_steps = 0 if best else state.idle_steps + 1
        if state.idle_steps >= PROBE_AFTER and price < 1:
            state.idle_steps, best = 0, self._lengths[1] if self._lengths[0] == 0 else self._lengths[0]
        return best

    def observe(self, request: Request, sampled: Sequence[int]) -> int:
        """What became of a request's drafts, from what was reported for the rows of its run.

        Returns how many of the rows count: one more than the accepted drafts.
        """
        valid = 1
        while valid < len(sampled) and sampled[valid] >= 0:
            valid += 1
        accepted, drafted = valid - 1, sum(token != NO_DRAFT for token in sampled[1:])
        if drafted:
            request.draft_acceptance.observe(drafted, accepted)
            self._all.observe(drafted, accepted)
            self.counts.drafts += 1
            self.counts.draft_tokens += drafted
            self.counts.accepted_tokens += accepted
            for place in range(accepted):
                self.counts.accepted_at[place] += 1
        return valid

    def observe_step(self, rows: int, tokens: int, seconds: float) -> None:
        """A step of `rows` computed rows, all of them decoding, made `tokens` tokens in so many seconds."""
        self._cost.observe(rows, tokens, seconds)

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
