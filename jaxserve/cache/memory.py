"""The memory plan: weights, pages, workspace and what is left, computed and checked before anything is allocated."""

import os
from dataclasses import dataclass

import jax

from jaxserve.cache.kv_cache import KVLayout

# The default pool on a CPU: what `max_num_seqs` requests of ordinary length need, not the machine's whole memory.
CPU_POOL_BYTES = 2 * 2**30
CPU_TOKENS_PER_REQUEST = 512


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. `total` is what the device has, `workspace` what the largest program is reckoned to need."""

    total: int
    weights: int
    workspace: int
    page_bytes: int
    num_pages: int
    page_size: int

    @property
    def pages(self) -> int:
        return self.num_pages * self.page_bytes

    def __str__(self) -> str:
        gib = lambda size: f"{size / 2**30:.2f} GiB"
        left = self.total - self.weights - self.pages - self.workspace
        return (
            f"memory: {gib(self.total)} = weights {gib(self.weights)} + {self.num_pages} pages {gib(self.pages)} "
            f"({self.num_pages * self.page_size:,} tokens) + workspace {gib(self.workspace)} + left {gib(left)}"
        )


def device_memory(device: jax.Device) -> int:
    """Bytes of memory: the allocator's own limit where it has one, else the machine's."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return limit if limit else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan_memory(
    layout: KVLayout,
    *,
    weights: int,
    workspace: int,
    total: int,
    is_cpu: bool,
    memory_utilization: float,
    num_pages: int | None,
    wanted_tokens: int,
) -> MemoryPlan:
    """The pool's size from the options; on a CPU no more than `wanted_tokens` and CPU_POOL_BYTES by default.

    ValueError if it does not fit, naming the option to change.
    """
    page_bytes = layout.bytes_per_page
    room = int(total * memory_utilization) - weights - workspace
    if num_pages is None:
        enough = -(-wanted_tokens // layout.page_size) * page_bytes
        num_pages = (min(room, CPU_POOL_BYTES, enough) if is_cpu else room) // page_bytes
    plan = MemoryPlan(total, weights, workspace, page_bytes, max(num_pages, 0), layout.page_size)
    if num_pages < 1 or num_pages * page_bytes > room:
        raise ValueError(
            f"memory_utilization={memory_utilization}: weights, workspace and at least one page must fit its share of "
            f"the device; num_pages={plan.num_pages} does not. {plan}"
        )
    return plan
