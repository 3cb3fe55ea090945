"""What became of draft tokens. A leaf: knows no JAX."""

from dataclasses import dataclass

# What the device reports for a row that yields no token.
NO_TOKEN = -1  # no token was left to sample
REJECTED = -2  # the draft that the row computes, or one before it, was rejected
NO_DRAFT = -3  # there was no such draft

FORGET = 0.9  # weight of an earlier draft in a request's acceptance
PRIOR_DRAFTS = 1.0  # drafts' worth of the mean acceptance in a request's own


@dataclass(slots=True)
class Acceptance:
    """How often drafts of a request were accepted, recent ones counting more."""

    accepted: float = 0.0
    tried: float = 0.0
    idle_steps: int = 0

    def observe(self, drafted: int, accepted: int) -> None:
        self.accepted = FORGET * self.accepted + accepted
        self.tried = FORGET * self.tried + accepted + (accepted < drafted)

    def rate(self, prior: float) -> float:
        """The probability that a draft is accepted whose predecessors are."""
        return (self.accepted + PRIOR_DRAFTS * prior) / (self.tried + PRIOR_DRAFTS)
