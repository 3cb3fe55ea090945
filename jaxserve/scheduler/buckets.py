"""The shapes of a step: the one place that warm-up and the running engine both ask. Knows no JAX."""

from bisect import bisect_left
from dataclasses import dataclass

ROW_MULTIPLE = 8  # every bucket is a multiple: whole vectors, and XLA's products keep their bits from 8 rows on


@dataclass(frozen=True)
class Buckets:
    """Sizes to which a step is padded, ascending.

    `tokens`: query tokens of the body. `rows`: sampled rows of the head.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def make(
        cls,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        smallest: int = ROW_MULTIPLE,
        *,
        speculates: bool = False,
    ) -> "Buckets":
        """Powers of two from `smallest`; the last holds the maximum exactly (rounded up to a multiple of 8).

        `smallest` is the fewest rows for which a row's bits do not depend on the others (deterministic mode). Where
        the engine `speculates`, every query row may be a row of the head, too.
        """
        rows = max(max_num_seqs, max_num_batched_tokens) if speculates else max_num_seqs
        return cls(_sizes(max_num_batched_tokens, smallest), _sizes(rows, smallest))

    def token_bucket(self, num_tokens: int) -> int:
        return _bucket(num_tokens, self.tokens)

    def row_bucket(self, num_rows: int) -> int:
        return _bucket(num_rows, self.rows)

    def exact_fit(self, demand: int, at_least: int) -> int:
        """How many of `demand` tokens to take so that little padding is computed; never fewer than `at_least`.

        Either all of them, or as many as fill the next smaller bucket, if that leaves fewer tokens for the next
        step than padding would cost in this one.
        """
        upper = bisect_left(self.tokens, demand)
        if upper == len(self.tokens):
            return self.tokens[-1]
        if upper == 0 or demand == self.tokens[upper]:
            return demand
        lower = self.tokens[upper - 1]
        return lower if lower >= at_least and self.tokens[upper] - demand > demand - lower else demand


def _sizes(largest: int, smallest: int) -> tuple[int, ...]:
    largest = max(-(-largest // ROW_MULTIPLE) * ROW_MULTIPLE, smallest)
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, largest)


def _bucket(count: int, sizes: tuple[int, ...]) -> int:
    index = bisect_left(sizes, count)
    if index == len(sizes):
        raise ValueError(f"{count} rows do not fit the largest bucket {sizes[-1]}")
    return sizes[index]
