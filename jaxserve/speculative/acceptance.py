"""What became of draft tokens. A leaf: knows no JAX."""

from dataclasses import dataclass

# What the device reports for a row that yields no token.
NO_TOKEN = -1  # no token was left to sample
REJECTED = -2  # the draft that the row computes, or one before it, was rejected
NO_DRAFT = -3  # there was no such draft

FORGET = 0.9  # weight of an earlier draft in a request's acceptance: texts change from part to part
FORGET_ALL = 0.99  # and in that of all requests, which only has to follow the kind of work
FADE = 0.99  # weight of what was seen before a step without drafts
PRIOR_DRAFTS = 3.0  # drafts' worth of the latter in the former: with less, chance alone stops a request's drafts


@dataclass(slots=True)
class Acceptance:
    """How often drafts were accepted, and how often there were any; an earlier one counts `forget` times as much."""

    accepted: float = 0.0
    tried: float = 0.0
    found: float = 0.0
    asked: float = 0.0
    forget: float = FORGET
    idle_steps: int = 0

    def observe(self, drafted: int, accepted: int) -> None:
        """Drafts were asked for, and `drafted` of them existed."""
        self.found = self.forget * self.found + (drafted > 0)
        self.asked = self.forget * self.asked + 1
        if drafted:
            self.accepted = self.forget * self.accepted + accepted
            self.tried = self.forget * self.tried + accepted + (accepted < drafted)

    def fade(self) -> None:
        """A step without drafts: its text is another now, and what was seen counts a little less against the prior."""
        self.accepted, self.tried = FADE * self.accepted, FADE * self.tried

    def rate(self, prior: float) -> float:
        """The probability that a draft is accepted whose predecessors are."""
        return (self.accepted + PRIOR_DRAFTS * prior) / (self.tried + PRIOR_DRAFTS)

    def existence(self, prior: float) -> float:
        """The probability that there are drafts."""
        return (self.found + PRIOR_DRAFTS * prior) / (self.asked + PRIOR_DRAFTS)
