"""The shapes of `gpu_check`: those of the H200, and tiny ones that the interpreter gets through."""

from dataclasses import dataclass, field
from typing import Any

from jaxserve.bench.models import MODELS
from jaxserve.kernels_pallas.paged_attention.benchmark import Heads
from jaxserve.kernels_pallas.verify_draft.benchmark import Shape


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """`interpret`: on the CPU. Contexts, prompts and page sizes are in tokens."""

    interpret: bool
    repeats: int
    copy_bytes: int
    square: int  # side of the square product that shows the arithmetic ceiling
    products: tuple[tuple[int, int], ...]  # (in, out)
    rows: tuple[int, ...]  # of a product, ascending
    timed_rows: tuple[int, ...]
    attention: tuple[tuple[Heads, int], ...]  # with a page size, for correctness
    cached: int  # context there
    chunk: int  # its last positions, computed together and apart
    chunk_rows: tuple[int, ...]  # those apart
    heads: Heads  # for speed
    page_sizes: tuple[int, ...]  # the engine's first
    contexts: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    typical: tuple[int, int]  # batch and context at which page sizes are compared
    prompts: tuple[int, ...]
    verified: tuple[Shape, ...]  # for correctness
    verify_timed: tuple[Shape, ...]
    pool_bytes: int
    model: dict[str, Any] = field(repr=False)
    layers: tuple[int, ...]
    batches: tuple[tuple[int, int], ...]  # (batch, context) of a decode step
    max_len: int

    @property
    def page_size(self) -> int:
        return self.page_sizes[0]

    @property
    def decoded(self) -> list[tuple[int, int]]:
        """(batch, context) of all decode steps of attention that are timed."""
        return [(batch, context) for context in self.contexts for batch in self.batch_sizes]


FULL = Sizes(
    interpret=False,
    repeats=20,
    copy_bytes=2**31,
    square=8192,
    products=((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)),
    rows=(8, 64, 128, 256, 2048),
    timed_rows=(8, 64, 2048),
    attention=(
        (Heads(2, 4, 128), 64),
        (Heads(2, 4, 128), 16),
        (Heads(2, 3, 64), 64),
        (Heads(2, 1, 64), 128),
        (Heads(1, 8, 128), 32),
        (Heads(1, 4, 256), 64),
    ),
    cached=1300,
    chunk=128,
    chunk_rows=(0, 37, 64, 127),
    heads=Heads(8, 4, 128),
    page_sizes=(64, 16, 32, 128),
    contexts=(512, 4096, 32768),
    batch_sizes=(1, 16, 64, 256),
    typical=(64, 4096),
    prompts=(512, 4096, 16384),
    verified=(Shape(64, 8, 128256), Shape(16, 4, 49152)),
    verify_timed=tuple(
        Shape(rows, width, vocab)
        for vocab in (128256, 49152)
        for rows, width in ((1, 1), (1, 8), (16, 4), (64, 1), (64, 8))
    ),
    pool_bytes=4 * 2**30,
    model=MODELS["Llama-3-8B"],
    layers=(4, 32),
    batches=((1, 4096), (16, 4096), (64, 4096), (256, 1024)),
    max_len=8192,
)

TINY = Sizes(
    interpret=True,
    repeats=1,
    copy_bytes=2**16,
    square=64,
    products=((128, 192), (192, 64)),
    rows=(8, 72),
    timed_rows=(8,),
    attention=((Heads(1, 2, 64), 16),),
    cached=140,
    chunk=40,
    chunk_rows=(0, 39),
    heads=Heads(1, 2, 64),
    page_sizes=(64, 16),
    contexts=(70, 20),
    batch_sizes=(2,),
    typical=(2, 70),
    prompts=(24,),
    verified=(Shape(3, 2, 260),),
    verify_timed=(Shape(1, 2, 260),),
    pool_bytes=2**16,
    model={
        **MODELS["Llama-3-8B"],
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 256,
    },
    layers=(1,),
    batches=((2, 70),),
    max_len=192,
)
