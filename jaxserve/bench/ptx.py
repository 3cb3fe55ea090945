"""What the compiler says of a kernel that interpretation cannot: registers and spills, fences in its PTX, and the
arithmetic that decides bits."""

import os
import re
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass

_EVENTS = re.compile(r"\b(stmatrix|st\.shared|fence\.proxy\.async|wgmma\.mma_async)\b")
_ARITHMETIC = re.compile(r"\b((?:add|sub|mul|div|fma|ex2)\.[\w.]*f32|cvt\.rn[\w.]*)\b")


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one of our kernels."""

    name: str
    registers: int
    spilled_bytes: int
    serialized: bool  # its WGMMAs wait for each other


@contextmanager
def compiler_output():
    """What is written to the process's standard output: Mosaic reports there the PTX and what ptxas says of it."""
    os.environ["MOSAIC_GPU_DUMP_PTX"] = os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    output = [""]
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        saved = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield output
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            output[0] = file.read().decode(errors="replace")


def kernels_of(text: str) -> list[Kernel]:
    """What `ptxas -v` says, in its order."""
    kernels, serialized = [], re.findall(r"wgmma.*serialized.*function '(.*?)'", text)
    for part in re.split(r"Compiling entry function ", text)[1:]:
        name = re.match(r"'(.*?)'", part)[1]
        spills = [int(size) for size in re.findall(r"(\d+) bytes spill (?:stores|loads)", part)]
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        kernels.append(Kernel(name, registers, sum(spills), name in serialized))
    return kernels


def ptx_of(text: str) -> tuple[str, ...]:
    """The PTX of each kernel."""
    return tuple(re.split(r"^(?=\.version )", text, flags=re.MULTILINE)[1:])


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
