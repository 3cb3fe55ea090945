"""What the compiled PTX of a kernel says that interpretation cannot: fences, and the arithmetic that decides bits."""

import re
from collections import Counter

_EVENTS = re.compile(r"\b(stmatrix|fence\.proxy\.async|wgmma\.mma_async)\b")
_ARITHMETIC = re.compile(r"\b((?:add|sub|mul|div|fma|ex2)\.[\w.]*f32|cvt\.rn[\w.]*)\b")


def stores_before_wgmma_are_fenced(ptx: str) -> bool:
    """Whether every matrix store into SMEM is followed by a proxy fence before a WGMMA, which reads it otherwise."""
    events = _EVENTS.findall(ptx)
    stored = False
    for event in events:
        if event == "wgmma.mma_async" and stored:
            return False
        stored = event == "stmatrix" if event != "wgmma.mma_async" else stored
    return "stmatrix" in events and "wgmma.mma_async" in events


def arithmetic(ptx: str) -> Counter:
    """How often each floating-point instruction stands in a kernel. Two kernels whose rows shall have the same bits
    have the same numbers: a multiplication that is contracted in one of them alone shows here."""
    return Counter(_ARITHMETIC.findall(ptx))
