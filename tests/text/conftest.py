"""Tokenizers for the tests of this folder."""

import pytest
from small_backends import BACKENDS

from jaxserve.checkpoint.demo_model import demo_model_folder
from jaxserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def small_tokenizers() -> dict[str, Tokenizer]:
    """One tokenizer of each kind; their vocabularies are padded by two ids that stand for nothing."""
    made = {}
    for name, backend in BACKENDS.items():
        size = Tokenizer(backend()).vocab_size
        made[name] = Tokenizer(backend(), vocab_size=size + 2)
    return made


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    """The demo model's tokenizer (fetches the model where it is not there yet)."""
    return Tokenizer.from_folder(demo_model_folder())
