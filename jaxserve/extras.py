"""Optional libraries, imported when they are first used."""

from importlib import import_module
from types import ModuleType


def optional(module: str, extra: str, purpose: str) -> ModuleType:
    """The module; ValueError that names the extra where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(
            f"{purpose} needs {package}, which cannot be imported ({error}): pip install 'jaxserve[{extra}]'"
        ) from None
