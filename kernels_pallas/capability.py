"""Whether the kernels for Hopper can run on a device; told without importing them."""

from typing import Any


def why_no_hopper(device: Any) -> str | None:
    """Why they cannot run on a `jax.Device`, or None if they can."""
    if device.platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU of compute capability 9.0 (H100, H200), not the platform {device.platform!r}"
    capability = getattr(device, "compute_capability", "unknown")
    if str(capability) != "9.0":
        return f"it needs compute capability 9.0 (H100, H200); {device.device_kind} has {capability}"
    return None
