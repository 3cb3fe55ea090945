"""What each POST does with its body: answers, whole or streamed, and the tokenizer's two ways. Knows no HTTP."""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from jaxserve.beam_search import BeamSearchParams
from jaxserve.outputs import RequestOutput
from jaxserve.server.answers import AnswerBuilder, ChatBuilder, CompletionBuilder
from jaxserve.server.embeddings import FIELD_NAMES, EmbeddingBuilder, EmbeddingRequest
from jaxserve.server.endpoint import Call
from jaxserve.server.errors import ApiError, refusals
from jaxserve.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from jaxserve.server.reasoning import shows_special_tokens
from jaxserve.server.responses import ResponseBuilder, ResponsesRequest
from jaxserve.server.service import Service
from jaxserve.server.tracing import RequestSpan, request_attributes

# What clients call fields that are refused under another name.
FORM_NAMES = {
    "structured_outputs.json": "response_format.json_schema.schema",
    "structured_outputs.structural_tag": "response_format",
    "structured_outputs": "response_format",
}
RESPONSES_NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "messages": "input",
    "function.parameters": "parameters",
    "tool_choice.function": "tool_choice",
    "max_tokens": "max_output_tokens",
}


async def complete(
    service: Service, call: Call, request: CompletionRequest | ChatCompletionRequest
) -> str | AsyncIterator[list[str]]:
    """A completion or a chat completion."""
    generation = Generation(service, call, request)
    return generation.events() if request.stream else await generation.whole()


async def respond(service: Service, call: Call, request: ResponsesRequest) -> str | AsyncIterator[list[str]]:
    """A response: a chat in another dress."""
    with refusals():
        chat = request.chat()
    generation = Generation(service, call, chat, partial(ResponseBuilder, request), RESPONSES_NAMES)
    return generation.events() if request.stream else await generation.whole()


async def embed(service: Service, call: Call, request: EmbeddingRequest) -> str:
    """Embeddings."""
    return await Generation(service, call, request).whole()


class Generation:
    """One request on its way through the engine."""

    def __init__(
        self,
        service: Service,
        call: Call,
        request: CompletionRequest | ChatCompletionRequest | EmbeddingRequest,
        chat_builder: Callable[..., ChatBuilder] = ChatBuilder,
        names: Mapping[str, str] | None = None,
    ):
        """`names` are what the client calls the fields of a chat."""
        self._chat_builder, self._names = chat_builder, names or {}
        self._form_names = FORM_NAMES if getattr(request, "response_format", None) is not None else {}
        self._service, self._call, self._request = service, call, request
        self._model = service.check_model(request.model)
        tenant = call.tenant or request.user or ""
        self._beams: BeamSearchParams | None = None
        with refusals({**self._form_names, **self._names}):
            if isinstance(request, EmbeddingRequest):
                self._params = request.pooling_params(tenant=tenant)
            else:
                self._params = request.sampling_params(service.default_sampling_params, tenant=tenant)
                self._beams = request.beam_search(self._params, tenant=tenant)
        self._num_prompts = 1 if isinstance(request, ChatCompletionRequest) else len(request.prompts())
        each = self._beams.beam_width if self._beams is not None else getattr(self._params, "n", 1)
        self._num_answers = self._num_prompts * each
        if self._num_prompts > (most := service.config.max_prompts_per_request):
            field = "input" if isinstance(request, EmbeddingRequest) else "prompt"
            raise ApiError(400, f"{field}: {self._num_prompts} prompts: must be at most {most}", param=field)

    async def whole(self) -> str:
        outputs: list[RequestOutput | None] = [None] * self._num_prompts
        async with aclosing(self._outputs()) as arriving:
            async for builder, prompt, output in arriving:
                if outputs[prompt] is None:
                    outputs[prompt] = output
                else:
                    outputs[prompt].extend(output)
                if None not in outputs and all(output.finished for output in outputs):
                    return builder.whole(outputs).model_dump_json()
        raise RuntimeError("the outputs have ended before the requests")

    async def events(self) -> AsyncIterator[list[str]]:
        """The JSON of the events, those that come together as one list."""
        request = self._request
        async with aclosing(self._outputs()) as arriving:
            async for builder, prompt, output in arriving:
                events = builder.events(prompt, output)
                if request.usage_always:
                    for event in events:
                        event.usage = builder.usage
                if events:
                    yield [event.model_dump_json() for event in events]
        if request.usage_at_end:
            yield [builder.usage_event().model_dump_json()]

    async def _outputs(self) -> AsyncIterator[tuple[AnswerBuilder, int, RequestOutput]]:
        """(the answer in the making, index of the prompt, what is new)."""
        service, call = self._service, self._call
        interval = getattr(self._request, "stream_interval", None) or service.config.stream_interval
        with service.places(self._num_answers):
            builder = await service.in_thread(self._prepare)
            spans = self._spans(builder)
            try:
                asked = self._beams or self._params
                outputs = service.outputs(builder.prompts, asked, arrival_time=call.started, interval=interval)
                async with aclosing(outputs) as arriving:
                    async for prompt, output in arriving:
                        if call.first_output is None:
                            call.first_output = time.monotonic()
                        if spans:
                            spans[prompt].take(output)
                        yield builder, prompt, output
            finally:
                for span in spans:
                    span.end()
                call.details |= {
                    "prompts": self._num_prompts,
                    "prompt_tokens": builder.num_prompt_tokens,
                    "cached_tokens": builder.num_cached_tokens,
                    "completion_tokens": builder.num_output_tokens,
                    "finish_reason": "+".join(sorted(set(builder.finish_reasons))) or None,
                }

    def _spans(self, builder: AnswerBuilder) -> list[RequestSpan]:
        """One a prompt, where traces are wanted."""
        tracing, call = self._service.tracing, self._call
        if tracing is None:
            return []
        lengths = [len(prompt["prompt_token_ids"]) for prompt in builder.prompts]
        names = [call.request_id] if len(lengths) == 1 else [f"{call.request_id}-{i}" for i in range(len(lengths))]
        told = [
            request_attributes(name, self._model, self._params, length)
            for name, length in zip(names, lengths, strict=True)
        ]
        return [tracing.request(call.trace_headers, call.started, attributes) for attributes in told]

    def _prepare(self) -> AnswerBuilder:
        service, request = self._service, self._request
        names = {"request_id": self._call.request_id, "model": self._model}
        if isinstance(request, EmbeddingRequest):
            with refusals(FIELD_NAMES):
                prompts = service.checked(request.prompts(), self._params)
            return EmbeddingBuilder(request, self._params, prompts, service.tokenizer, **names)
        if isinstance(request, ChatCompletionRequest):
            return self._prepare_chat(names)
        with refusals({**self._form_names, **self._names}):
            prompts = service.checked(request.prompts(), self._beams or self._params)
        return CompletionBuilder(request, self._params, prompts, service.tokenizer, **names)

    def _prepare_chat(self, names: dict[str, str]) -> AnswerBuilder:
        service, request, form_names = self._service, self._request, self._form_names
        if not form_names and request.structured_outputs is None and request.may_call:
            form_names = {"structured_outputs": "tools"}
        with refusals({**form_names, **self._names}):
            tools = service.tool_calling(request)
            prompt = service.chat_prompt(request.messages, request.rendering())
            begun = service.thinks_at_once(prompt["prompt"])
            if begun is not None and shows_special_tokens(service.tokenizer.special_tokens):
                self._params = replace(self._params, skip_special_tokens=False)
            if tools is not None:
                self._params = tools.params(self._params, begun)
            prompts = service.checked([prompt], self._beams or self._params)
        reader = partial(service.message_reader, request, self._params, begun, tools)
        return self._chat_builder(request, self._params, prompts, service.tokenizer, reader=reader, **names)


async def tokenize(service: Service, call: Call, request: TokenizeRequest) -> str:
    service.check_model(request.model)
    with refusals():
        tokens = await service.in_thread(service.tokens, request)
    answer = TokenizeAnswer(count=len(tokens), max_model_len=service.max_model_len, tokens=tokens)
    if request.return_token_strs:
        answer.token_strs = [service.tokenizer.token_text(token) for token in tokens]
    return answer.model_dump_json()


async def detokenize(service: Service, call: Call, request: DetokenizeRequest) -> str:
    service.check_model(request.model)
    with refusals():
        service.tokenizer.check_ids(request.tokens, "tokens")
    text = await service.in_thread(service.tokenizer.decode, request.tokens, False)
    return DetokenizeAnswer(prompt=text).model_dump_json()
