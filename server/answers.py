"""From the engine's outputs to OpenAI's answers: whole, or as what is new for the events of a stream. Knows no HTTP.

Both come from the same steps, so that a joined stream is the whole answer.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.pooling_params import PoolingParams
from jaxserve.sampling_params import SamplingParams
from jaxserve.server import logprobs
from jaxserve.server.message import MessageReader, Parts
from jaxserve.server.protocol import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    Completion,
    CompletionChoice,
    CompletionRequest,
    FunctionCall,
    PromptTokensDetails,
    ToolCallDelta,
    Usage,
)
from jaxserve.text.tokenizer import Tokenizer


class GenerationFailed(RuntimeError):
    """The engine ended an answer before its time, and says why."""


class AnswerBuilder(ABC):
    """One answer in the making."""

    prefix: str

    def __init__(
        self,
        params: SamplingParams | PoolingParams,
        prompts: Sequence[dict[str, Any]],
        tokenizer: Tokenizer,
        *,
        request_id: str,
        model: str,
    ):
        """`prompts` as `InputProcessor.check` returns them."""
        self.params, self.prompts, self.tokenizer = params, prompts, tokenizer
        self._head = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": model}
        self.finish_reasons: list[str] = []
        self.num_prompt_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
        self.num_output_tokens = 0
        self._cached = [0] * len(prompts)

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._cached)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=self.num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.num_cached_tokens),
        )

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> Answer:
        """The answer, from the complete output of each prompt."""


class ChoicesBuilder(AnswerBuilder):
    """An answer of choices, which may be streamed. Choice `p * n + i` is continuation i of prompt p."""

    def events(self, prompt: int, output: RequestOutput) -> list[Answer]:
        """What `output` adds to a prompt's choices, an event for each that has something new."""
        return [self._event([choice]) for choice in self._new(prompt, output) if choice is not None]

    @abstractmethod
    def usage_event(self) -> Answer:
        """The last event of a stream that asked for the usage."""

    @abstractmethod
    def _event(self, choices: list) -> Answer:
        pass

    @abstractmethod
    def _choice(self, prompt: int, index: int, output: CompletionOutput, source: RequestOutput) -> Any:
        """What is new in choice `index`, or None if nothing is to be seen."""

    def _new(self, prompt: int, output: RequestOutput) -> list:
        """Count what has come, and make choices of it. GenerationFailed if the engine gave up."""
        self._cached[prompt] = output.num_cached_tokens
        choices = []
        for new in output.outputs:
            if new.finish_reason not in (None, "stop", "length"):
                raise GenerationFailed(new.error or "the request was aborted")
            self.num_output_tokens += len(new.token_ids)
            if new.finish_reason is not None:
                self.finish_reasons.append(new.finish_reason)
            choices.append(self._choice(prompt, prompt * self.params.n + new.index, new, output))
        return choices


class CompletionBuilder(ChoicesBuilder):
    prefix = "cmpl"

    def __init__(self, request: CompletionRequest, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._echo, self._wants_logprobs = bool(request.echo), request.logprobs is not None
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        self._echoed = [logprobs.prompt_parts(self.tokenizer, ids) for ids in self._ids()] if self._echo else []
        self._writers: dict[int, logprobs.CompletionLogprobsWriter] = {}
        self._prompt_logprobs: list[list | None] = [None] * len(self.prompts)

    def _ids(self) -> list[list[int]]:
        return [prompt["prompt_token_ids"] for prompt in self.prompts]

    def usage_event(self) -> Completion:
        return Completion(**self._head, choices=[], usage=self.usage)

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        choices = [choice for prompt, output in enumerate(outputs) for choice in self._new(prompt, output)]
        if self._wants_prompt_logprobs:
            for choice in choices:
                entries = outputs[choice.index // self.params.n].prompt_logprobs
                choice.prompt_logprobs = logprobs.prompt_logprobs(self.tokenizer, entries)
        return Completion(**self._head, choices=choices, usage=self.usage)

    def _event(self, choices: list) -> Completion:
        return Completion.model_construct(**self._head, choices=choices)

    def _choice(
        self, prompt: int, index: int, output: CompletionOutput, source: RequestOutput
    ) -> CompletionChoice | None:
        text, lists = output.text, None
        if source.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = source.prompt_logprobs
        if first := index not in self._writers:
            start = sum(map(len, self._echoed[prompt])) if self._echo else 0
            self._writers[index] = logprobs.CompletionLogprobsWriter(
                self.tokenizer, skip_special_tokens=self.params.skip_special_tokens, start=start
            )
        if self._wants_logprobs:
            lists = self._writers[index].push(output)
        if first and self._echo:
            text = "".join(self._echoed[prompt]) + text
            if self._wants_logprobs:
                entries = self._prompt_logprobs[prompt]
                echoed = logprobs.echoed_logprobs(self.tokenizer, self._ids()[prompt], self._echoed[prompt], entries)
                lists = logprobs.joined(echoed, lists)
        if not text and output.finish_reason is None and not (lists and lists.tokens):
            return None
        reasons = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        return CompletionChoice.model_construct(index=index, text=text, logprobs=lists, **reasons)


class ChatBuilder(ChoicesBuilder):
    prefix = "chatcmpl"

    def __init__(
        self,
        request: ChatCompletionRequest,
        *arguments: Any,
        reader: Callable[[], MessageReader] = MessageReader,
        **options: Any,
    ):
        """`reader` makes what reads one choice."""
        super().__init__(*arguments, **options)
        self._readers = [reader() for _ in range(self.params.n)]
        self._top = request.top_logprobs or 0
        self._wants_logprobs = bool(request.logprobs)
        self._begun: set[int] = set()

    def usage_event(self) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._head, choices=[], usage=self.usage)

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        [output] = outputs
        choices = []
        for new in self._new(0, output):
            delta = new.delta
            has_other_parts = delta.tool_calls or delta.reasoning_content
            message = ChatMessage(content=delta.content or (None if has_other_parts else ""))
            message.reasoning_content = delta.reasoning_content
            if delta.tool_calls:
                message.tool_calls = [ChatToolCall(id=call.id, function=call.function) for call in delta.tool_calls]
            reasons = {"finish_reason": new.finish_reason, "stop_reason": new.stop_reason}
            choice = ChatChoice(index=new.index, message=message, logprobs=new.logprobs, **reasons)
            if output.prompt_logprobs is not None:
                choice.prompt_logprobs = logprobs.prompt_logprobs(self.tokenizer, output.prompt_logprobs)
            choices.append(choice)
        return ChatCompletion(**self._head, choices=choices, usage=self.usage)

    def _event(self, choices: list) -> ChatCompletionChunk:
        return ChatCompletionChunk.model_construct(**self._head, choices=choices)

    def _choice(
        self, prompt: int, index: int, output: CompletionOutput, source: RequestOutput
    ) -> ChatChunkChoice | None:
        reader, reason = self._readers[index], output.finish_reason
        parts = reader.push(output.text, final=reason is not None)
        if not any(parts) and reason is None and not (self._wants_logprobs and output.token_ids):
            return None
        delta = self._delta(reader, parts)
        if reason == "stop" and reader.num_calls:
            reason = "tool_calls"
        if index not in self._begun:
            self._begun.add(index)
            delta.role = "assistant"
        entries = None
        if self._wants_logprobs:
            entries = ChatLogprobs(content=logprobs.chat_logprobs(self.tokenizer, output, self._top), refusal=None)
        reasons = {"finish_reason": reason, "stop_reason": output.stop_reason}
        return ChatChunkChoice.model_construct(index=index, delta=delta, logprobs=entries, **reasons)

    @staticmethod
    def _delta(reader: MessageReader, parts: Parts) -> ChatDelta:
        if not reader.reads:
            return ChatDelta.model_construct(content=parts.content)
        delta = ChatDelta.model_construct()
        delta.content, delta.reasoning_content = parts.content or None, parts.reasoning or None
        if parts.calls:
            delta.tool_calls = [
                ToolCallDelta(
                    index=reader.num_calls - len(parts.calls) + place,
                    id=call.id,
                    function=FunctionCall(name=call.name, arguments=call.arguments),
                )
                for place, call in enumerate(parts.calls)
            ]
        return delta
