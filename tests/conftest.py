"""What every test runs under: strict dtype promotion (shapes are checked by jaxtyping, see pyproject.toml)."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 2)  # for the tests of a mesh; before any backend starts
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session")
def cpu_devices():
    """The two CPU devices that mesh tests run on."""
    return jax.devices("cpu")
