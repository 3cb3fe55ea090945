"""The memory plan: its arithmetic and its refusals."""

from unittest.mock import create_autospec

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cache.kv_cache import KVLayout, allocate
from jaxserve.cache.memory import CPU_POOL_BYTES, MemoryPlan, device_memory, plan_memory

LAYOUT = KVLayout(num_layers=3, kv_heads=2, head_dim=8, page_size=16, dtype=jnp.dtype("bfloat16"))
PAGE_BYTES = 3 * 2 * 2 * 8 * 16 * 2


def plan(**changes) -> MemoryPlan:
    options = {
        "weights": 300,
        "workspace": 200,
        "total": 100 * PAGE_BYTES,
        "is_cpu": False,
        "memory_utilization": 1.0,
        "num_pages": None,
        "wanted_tokens": 10**12,
    }
    return plan_memory(LAYOUT, **(options | changes))


def test_a_page_is_as_large_as_what_is_allocated():
    assert LAYOUT.bytes_per_page == PAGE_BYTES
    kv = allocate(LAYOUT, 5)
    assert sum(layer.pages.nbytes for layer in kv) == 5 * PAGE_BYTES
    assert not any(layer.pages.any() for layer in kv)


@given(
    total=st.integers(0, 10**7),
    weights=st.integers(0, 10**6),
    workspace=st.integers(0, 10**6),
    share=st.floats(0.01, 1.0),
    is_cpu=st.booleans(),
    num_pages=st.none() | st.integers(1, 4000),
)
def test_a_plan_fits_its_share_and_leaves_no_page_unused(total, weights, workspace, share, is_cpu, num_pages):
    room = int(total * share) - weights - workspace
    changes = {"weights": weights, "workspace": workspace, "total": total, "memory_utilization": share}
    if room < (num_pages or 1) * PAGE_BYTES:
        with pytest.raises(ValueError, match=f"memory_utilization={share}: .*num_pages="):
            plan(**changes, is_cpu=is_cpu, num_pages=num_pages)
        return
    made = plan(**changes, is_cpu=is_cpu, num_pages=num_pages)
    assert made.pages == made.num_pages * PAGE_BYTES <= room
    if num_pages is None:
        assert room - made.pages < PAGE_BYTES
    else:
        assert made.num_pages == num_pages


def test_a_cpu_keeps_its_memory_but_for_an_explicit_pool():
    total = 4 * CPU_POOL_BYTES
    assert plan(total=total, is_cpu=True).num_pages == CPU_POOL_BYTES // PAGE_BYTES
    assert plan(total=total, is_cpu=False).pages > 3 * CPU_POOL_BYTES
    assert plan(total=total, is_cpu=True, wanted_tokens=100).num_pages == 7, "no more than is wanted"
    assert plan(total=total, is_cpu=False, wanted_tokens=100).num_pages > 7
    explicit = 2 * CPU_POOL_BYTES // PAGE_BYTES
    assert plan(total=total, is_cpu=True, num_pages=explicit).num_pages == explicit


def test_the_error_names_the_numbers():
    with pytest.raises(ValueError, match=r"memory_utilization=0\.5: .*num_pages=51 does not.*51 pages.*816 tokens"):
        plan(memory_utilization=0.5, num_pages=51)
    with pytest.raises(ValueError, match="num_pages=0 does not"):
        plan(weights=200 * PAGE_BYTES)


def test_the_printed_parts_add_up_to_the_total():
    gib = 2**30
    text = str(
        MemoryPlan(total=8 * gib, weights=gib, workspace=gib // 2, page_bytes=gib // 16, num_pages=40, page_size=16)
    )
    assert text == (
        "memory: 8.00 GiB = weights 1.00 GiB + 40 pages 2.50 GiB (640 tokens) + workspace 0.50 GiB + left 4.00 GiB"
    )


def test_device_memory_is_the_allocators_limit_where_there_is_one():
    device = create_autospec(jax.Device, instance=True)
    device.memory_stats.return_value = {"bytes_limit": 12345}
    assert device_memory(device) == 12345
    device.memory_stats.return_value = {"bytes_in_use": 1}
    machine = device_memory(device)
    assert machine > 2**28
    device.memory_stats.return_value = None
    assert device_memory(device) == machine
