"""jaxserve: an exact LLM inference engine for JAX. Importing it sets no global JAX configuration.

Names are imported when they are first used, so that options can be checked before JAX is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine import Engine
    from jaxserve.llm import LLM
    from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput
    from jaxserve.sampling_params import SamplingParams
    from jaxserve.scoring import Score

__all__ = ["LLM", "CompletionOutput", "Engine", "EngineConfig", "Logprob", "RequestOutput", "SamplingParams", "Score"]

_MODULES = {
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "Engine": "engine",
    "EngineConfig": "config",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "Score": "scoring",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
