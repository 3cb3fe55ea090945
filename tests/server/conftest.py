import pytest
from server_tools import LocalServer, byte_engine

from jaxserve.runner import determinism


@pytest.fixture(scope="module", autouse=True)
def trusted():
    """Other tests test this machine for determinism."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(determinism, "row_invariance", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def shared():
    server = LocalServer(byte_engine())
    yield server
    server.close()


@pytest.fixture
def server(shared):
    """The shared one; after every test it must become idle and whole by itself."""
    yield shared
    shared.idle()


@pytest.fixture(scope="module")
def oracle():
    """An engine of the same kind, to ask directly."""
    with byte_engine() as engine:
        yield engine
