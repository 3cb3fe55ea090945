"""How a draft head is trained: apart from the trainer, so that the command line knows it without JAX."""

from dataclasses import dataclass

from jaxserve.validation import is_integer, is_number, require

DEPTH = 3  # drafts, each from the state that the one before left


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """
    draft_vocab: tokens that the head knows, the most frequent ones of the corpus; None is all
    epochs: times that the corpus is seen, the last quarter of them (rounded up) `DEPTH` drafts deep, the others one
    batch_size: sequences in a step
    learning_rate: the highest; it rises for the first 5 % of the steps, then falls by a cosine
    """

    draft_vocab: int | None = 4096
    epochs: int = 8
    batch_size: int = 8
    learning_rate: float = 2e-3
    seed: int = 0

    def __post_init__(self):
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            require(is_integer(value) and value >= 1, name, value, "an integer of at least 1")
        vocab, rate = self.draft_vocab, self.learning_rate
        valid = vocab is None or (is_integer(vocab) and vocab >= 1)
        require(valid, "draft_vocab", vocab, "an integer of at least 1 or None")
        require(is_number(rate) and rate > 0, "learning_rate", rate, "a number above 0")

    def depth(self, epoch: int) -> int:
        """How many drafts deep an epoch goes, counted from 0."""
        return DEPTH if epoch >= self.epochs * 3 // 4 else 1
