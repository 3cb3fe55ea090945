"""What every test runs under: strict dtype promotion (shapes are checked by jaxtyping, see pyproject.toml)."""

import logging

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 2)  # for the tests of a mesh; before any backend starts
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session")
def cpu_devices():
    """The two CPU devices that mesh tests run on."""
    return jax.devices("cpu")


@pytest.fixture(autouse=True)
def loggers():
    """`serve` sends the process's log lines to stderr: a test that runs it here leaves them as they were."""
    found = [logging.getLogger(name) for name in ("jaxserve", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in found]
    yield
    for logger, (handlers, propagate, level) in zip(found, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
