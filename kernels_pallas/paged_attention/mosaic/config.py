"""Tiles of the Hopper kernels, and which to take for which shape."""

from dataclasses import dataclass

from jaxserve.kernels_pallas.hopper import MAX_SMEM, ROWS, SMEM_PER_SM, SMEM_RESERVED, SMS, Interpret

KV_BLOCK = 64  # keys of a block; 128 need more registers than there are once splits are folded
MAX_ITEM_TOKENS = 16  # query tokens of a decode item: one and 15 drafts
COLUMNS = 128  # columns of the values, and of the result, that a program takes; more find no registers
STATS = 32  # columns in which a partial result keeps its maximum and its mass: 128 bytes, the least of a bulk copy
WHOLE = -1  # the `split` of a decode item that covers its whole context


@dataclass(frozen=True)
class TileConfig:
    """How the kernels cut their work. Bits depend on `split_blocks` alone, and on whether products are interpreted.

    Attributes:
        split_blocks: blocks after which every row folds, wherever it is computed: 512 keys. With half as many, results
            of splits are twice as many bytes; with twice as many, a sequence alone keeps too few programs busy.
        decode_stages, prefill_stages: KV blocks on their way in or in use.
        decode_programs, prefill_programs: programs of a grid, as many as the GPU holds at once; each takes its share.
        prefill_workers: warpgroups of 64 query rows in a prefill program; one more copies. Three would find too few
            registers to fold.
        max_partial_rows: query rows × splits whose results one step may keep; what is beyond is not split.
        small_bucket: steps of at most so many tokens leave everything to the decode kernel, and save a launch.
        interpret: None, or how to interpret the kernels on the CPU (`hopper.interpreted`).
    """

    split_blocks: int = 8
    decode_stages: int = 3
    decode_programs: int = 2 * SMS
    prefill_workers: int = 2
    prefill_stages: int = 3
    prefill_programs: int = SMS
    max_partial_rows: int = 2048
    small_bucket: int = 64
    interpret: Interpret = None

    def __post_init__(self):
        for name in ("decode_stages", "prefill_stages"):
            if not 2 <= getattr(self, name) <= 8:
                raise ValueError(f"{name}={getattr(self, name)}: {name} must be 2 to 8")
        if not 1 <= self.prefill_workers <= 2:
            raise ValueError(f"prefill_workers={self.prefill_workers}: prefill_workers must be 1 or 2")

    @property
    def split(self) -> int:
        """Keys of a split."""
        return self.split_blocks * KV_BLOCK

    @classmethod
    def for_shape(cls, head_dim: int, itemsize: int = 2) -> "TileConfig":
        """The heuristic: at decode two programs an SM, so that one computes while the other waits for its pages; more
        find no registers."""
        stages = 6 if head_dim == 64 else 3
        per_sm = min(2, SMEM_PER_SM // (decode_smem(stages, head_dim, itemsize) + SMEM_RESERVED))
        return cls(
            decode_stages=stages,
            decode_programs=per_sm * SMS,
            prefill_stages={64: 4, 128: 3}.get(head_dim, 2),
        )


def item_tokens(group: int) -> int:
    """The most query tokens of a decode item: what fits a tile of 64 rows, `group` rows a token."""
    return min(MAX_ITEM_TOKENS, ROWS // group)


def tile_tokens(group: int, workers: int) -> int:
    """Query tokens of a prefill tile."""
    return workers * (ROWS // group)


def columns_of(head_dim: int) -> int:
    """Columns of the values that a program takes. Where it takes a part of them only, the others are another's, which
    computes the same scores, and so the same weights to the bit."""
    return min(head_dim, COLUMNS)


def decode_smem(stages: int, head_dim: int, itemsize: int = 2) -> int:
    """Bytes of shared memory of a decode program: queries, the ring of keys (or the result), the ring of values."""
    columns, block = columns_of(head_dim), stages * KV_BLOCK * itemsize
    result = ROWS * (columns + STATS) * 4
    return ROWS * head_dim * itemsize + max(block * head_dim, result) + block * columns + 2 * 8 * stages


def prefill_smem(stages: int, workers: int, head_dim: int, itemsize: int = 2) -> int:
    """Bytes of shared memory of a prefill program: queries and results of each worker, both rings."""
    both = head_dim + columns_of(head_dim)  # queries and results, keys and values
    return (workers * ROWS + stages * KV_BLOCK) * both * itemsize + 4 * 8 * stages


def fits(config: TileConfig, head_dim: int, itemsize: int = 2) -> bool:
    """Whether the kernels' shared memory fits a program."""
    decode = decode_smem(config.decode_stages, head_dim, itemsize)
    return max(decode, prefill_smem(config.prefill_stages, config.prefill_workers, head_dim, itemsize)) <= MAX_SMEM
