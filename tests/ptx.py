"""What the compiled PTX of a kernel says that interpretation cannot: fences, and the arithmetic that decides bits."""

import re
from collections import Counter

_EVENTS = re.compile(r"\b(stmatrix|st\.shared|fence\.proxy\.async|wgmma\.mma_async)\b")
_ARITHMETIC = re.compile(r"\b((?:add|sub|mul|div|fma|ex2)\.[\w.]*f32|cvt\.rn[\w.]*)\b")


def kernel_name(ptx: str) -> str:
    """The name of the function that a kernel was written as."""
    return re.search(r"\.entry (\w+?)_mosaic_gpu_kernel", ptx)[1]


def stores_for_wgmma(ptx: str) -> bool:
    """Whether a kernel multiplies and stores into SMEM from registers."""
    events = set(_EVENTS.findall(ptx))
    return "wgmma.mma_async" in events and bool(events & {"stmatrix", "st.shared"})


def stores_before_wgmma_are_fenced(ptx: str) -> bool:
    """Whether every store into SMEM is followed by a proxy fence before a WGMMA, which may read it otherwise.

    In the order of the text, and of what `stores_for_wgmma` says."""
    stored = False
    for event in _EVENTS.findall(ptx):
        if event == "wgmma.mma_async" and stored:
            return False
        stored = stored if event == "wgmma.mma_async" else event != "fence.proxy.async"
    return stores_for_wgmma(ptx)


def arithmetic(ptx: str) -> Counter:
    """How often each floating-point instruction stands in a kernel. Two kernels whose rows shall have the same bits
    have the same numbers: a multiplication that is contracted in one of them alone shows here."""
    return Counter(_ARITHMETIC.findall(ptx))
