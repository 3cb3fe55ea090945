"""Tiles of the Hopper product: how a result is cut, and what that costs in shared memory. Knows no kernel."""

from dataclasses import dataclass

from jaxserve.kernels_pallas.hopper import MAX_SMEM, SMS

INNER = 64  # the K of one stage: 128 bytes, the widest swizzle
_BARRIER_BYTES = 1024
_ENOUGH_BLOCKS = SMS * 9 // 10  # a smaller tile would not make up for the rest with what it reads twice
_MAX_STAGES = 12


@dataclass(frozen=True)
class TileConfig:
    """One block computes `rows` x `columns` of the result with a ring of `stages` K tiles in shared memory.

    A warpgroup takes 64 or 128 of the rows: 64 rows are one warpgroup, 128 are two with 64, 256 two with 128.
    """

    rows: int
    columns: int
    stages: int

    def __post_init__(self):
        if self.rows not in (64, 128, 256) or self.columns not in (64, 128):
            raise ValueError(f"a tile must have 64, 128 or 256 rows and 64 or 128 columns, not {self}")
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, not {self.stages}")

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute; one more copies."""
        return min(self.rows // 64, 2)

    def shared_bytes(self, itemsize: int, out_itemsize: int) -> int:
        """The ring, and for each warpgroup the piece of the result (64 x 64) that is on its way out."""
        ring = self.stages * (self.rows + self.columns) * INNER * itemsize
        return ring + self.warpgroups * 64 * 64 * out_itemsize + _BARRIER_BYTES


def choose_tiles(rows: int, columns: int, *, itemsize: int = 2, out_itemsize: int = 2) -> TileConfig:
    """The largest tile that still gives every SM a block, else the one that gives the most blocks.

    Up to 64 rows the weights' bytes are the cost, and narrow tiles spread them over more SMs; with many rows it is
    what the tiles read again and again: (rows + columns) / (rows * columns) values for each of the result's.
    """
    if rows <= 64:
        shapes = [(64, 128), (64, 64)]
    elif rows <= 128:
        shapes = [(128, 128), (128, 64)]
    else:
        shapes = [(256, 128), (128, 128), (128, 64)]
    shapes = [shape for shape in shapes if shape[1] <= columns]
    blocks = lambda shape: -(-rows // shape[0]) * -(-columns // shape[1])
    best = next((shape for shape in shapes if blocks(shape) >= _ENOUGH_BLOCKS), shapes[-1])
    fits = lambda stages: TileConfig(*best, stages).shared_bytes(itemsize, out_itemsize) <= MAX_SMEM
    return TileConfig(*best, next(stages for stages in range(_MAX_STAGES, 1, -1) if fits(stages)))
