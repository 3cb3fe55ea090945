"""`/v1/embeddings`: OpenAI's types with vLLM's extra fields, and the answer. Knows no HTTP."""

import base64
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float
from pydantic import BaseModel, Field

from jaxserve.outputs import RequestOutput
from jaxserve.pooling import embedding_of
from jaxserve.pooling_params import PoolingParams
from jaxserve.server.answers import AnswerBuilder, GenerationFailed
from jaxserve.server.protocol import Answer, Prompt, Request, several_prompts

# What the engine calls the input.
FIELD_NAMES = {"prompt_token_ids": "input", "prompt": "input"}


class EmbeddingRequest(Request):
    input: str | list[int] | list[str] | list[list[int]] = Field(description="A text, token ids, or several of them.")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64 is of little-endian float32.")
    dimensions: int | None = Field(None, description="The first numbers of each embedding, at length 1 again.")
    normalize: bool | None = Field(None, description="Whether embeddings have length 1; null is the model's way.")
    user: str | None = Field(None, description="The tenant under scheduling_policy 'fair' without API keys.")
    priority: int | None = Field(None, description="Lower goes first; needs a scheduling policy that knows it.")
    cache_salt: str | None = Field(None, description="Cached prefixes are shared only under the same salt.")

    def prompts(self) -> list[Prompt]:
        return several_prompts(self.input)

    def pooling_params(self, *, tenant: str = "") -> PoolingParams:
        """The engine's parameters. ValueError for what cannot be."""
        names = ("dimensions", "normalize", "priority", "cache_salt")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return PoolingParams(tenant=tenant, **given)


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(Answer):
    """An item for each input, in their order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    usage: EmbeddingUsage


class EmbeddingBuilder(AnswerBuilder):
    prefix = "embd"

    def __init__(self, request: EmbeddingRequest, *arguments, **options):
        super().__init__(*arguments, **options)
        self._encode = _base64 if request.encoding_format == "base64" else _floats

    def whole(self, outputs: Sequence[RequestOutput]) -> EmbeddingAnswer:
        items = []
        for index, output in enumerate(outputs):
            self._cached[index] = output.num_cached_tokens
            result = embedding_of(output)
            if result.embedding is None:
                raise GenerationFailed(result.error or "the request was aborted")
            items.append(EmbeddingItem(index=index, embedding=self._encode(result.embedding)))
        usage = EmbeddingUsage(prompt_tokens=self.num_prompt_tokens, total_tokens=self.num_prompt_tokens)
        return EmbeddingAnswer(**self._head, data=items, usage=usage)


def _floats(embedding: Float[np.ndarray, " dimensions"]) -> list[float]:
    return embedding.tolist()


def _base64(embedding: Float[np.ndarray, " dimensions"]) -> str:
    return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
