"""The shapes of `gpu_check`: those of the H200, and tiny ones that the interpreter gets through."""

from dataclasses import dataclass, field
from typing import Any

from jaxserve.bench.models import MODELS


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """`interpret` is for `plgpu.kernel`; None runs the real kernels. Contexts and page sizes are in tokens."""

    interpret: bool
    repeats: int
    copy_bytes: int
    square: int  # side of the square product that shows the arithmetic ceiling
    products: tuple[tuple[int, int], ...]  # (in, out)
    rows: tuple[int, ...]  # of a product, ascending
    model: dict[str, Any] = field(repr=False)
    layers: tuple[int, ...]
    page_size: int
    batches: tuple[tuple[int, int], ...]  # (batch, context) of a decode step
    max_len: int


FULL = Sizes(
    interpret=False,
    repeats=20,
    copy_bytes=2**31,
    square=8192,
    products=((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)),
    rows=(8, 16, 64, 128, 256, 2048),
    model=MODELS["Llama-3-8B"],
    layers=(4, 32),
    page_size=64,
    batches=((1, 4096), (16, 4096), (64, 4096), (256, 1024)),
    max_len=8192,
)

TINY = Sizes(
    interpret=True,
    repeats=1,
    copy_bytes=2**16,
    square=64,
    products=((128, 192), (192, 64)),
    rows=(8, 72, 136),
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
    page_size=64,
    batches=((2, 70),),
    max_len=192,
)
