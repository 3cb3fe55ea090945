"""The least time that a kernel can take: its bytes and operations against the device's."""

from typing import NamedTuple

# Of an H200, by its data sheet; what a copy and a large product reach is lower (`make gpu-check`).
HBM_BYTES_PER_S = 4.8e12
BF16_FLOP_PER_S = 989e12


class Cost(NamedTuple):
    """What a call must read and write (each byte once) and compute (a multiplication and an addition are two)."""

    bytes: int
    operations: int

    @property
    def floor(self) -> float:
        """Seconds that nothing goes below on an H200, by its data sheet."""
        return max(self.bytes / HBM_BYTES_PER_S, self.operations / BF16_FLOP_PER_S)


def matmul_cost(rows: int, inner: int, columns: int, *, itemsize: int = 2, out_itemsize: int = 2) -> Cost:
    """x [rows, inner] @ weight [inner, columns]."""
    read = (rows * inner + inner * columns) * itemsize
    return Cost(read + rows * columns * out_itemsize, 2 * rows * inner * columns)
