"""jaxserve: an exact LLM inference engine for JAX. Importing it sets no global JAX configuration."""

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.llm import LLM
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Engine", "EngineConfig", "Logprob", "RequestOutput", "SamplingParams"]
