"""jaxserve: an exact LLM inference engine for JAX. Importing it sets no global JAX configuration.

Names are imported when they are first used, so that options can be checked before JAX is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine
    from jaxserve.beam_search import BeamSearchParams
    from jaxserve.config import EngineConfig, PoolerConfig
    from jaxserve.engine import Engine
    from jaxserve.llm import LLM
    from jaxserve.messages import EngineDeadError
    from jaxserve.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput
    from jaxserve.pooling_params import PoolingParams
    from jaxserve.sampling_params import SamplingParams
    from jaxserve.scoring import Score
    from jaxserve.structured.params import StructuredOutputsParams
    from jaxserve.training import LogprobReport, logprob_report, output_logprobs, sequence_logprobs

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "Logprob",
    "LogprobReport",
    "PoolerConfig",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "StructuredOutputsParams",
    "logprob_report",
    "output_logprobs",
    "sequence_logprobs",
]

_MODULES = {
    "AsyncEngine": "async_engine",
    "BeamSearchParams": "beam_search",
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "EmbeddingOutput": "outputs",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineDeadError": "messages",
    "Logprob": "outputs",
    "LogprobReport": "training",
    "PoolerConfig": "config",
    "PoolingParams": "pooling_params",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "Score": "scoring",
    "StructuredOutputsParams": "structured.params",
    "logprob_report": "training",
    "output_logprobs": "training",
    "sequence_logprobs": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
