import pytest
from checkpoint_tools import write_tiny_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny checkpoint whose texts are ASCII."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("evaluation") / "tiny")
