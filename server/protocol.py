"""What clients send and get: OpenAI's types with vLLM's extra fields, and how a request becomes the engine's.

Types are strict: a field that is not here is refused by name, null means that a field was not given, and numbers are no
texts. What a value may be is checked where the engine checks it (`SamplingParams`, `InputProcessor`). Knows no HTTP.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxserve.beam_search import MAX_BEAMS, BeamSearchParams
from jaxserve.sampling_params import INT32_MAX, MAX_LOGPROBS, SamplingParams
from jaxserve.server.forms import MAX_TOOLS, ResponseFormat, ToolChoice, ToolDefinition, check_tools
from jaxserve.validation import require

MAX_STOPS, MAX_STOP_LENGTH = 16, 1000  # each token of each request is compared with all of its stop strings

Count = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Prompt = str | list[int]


class Request(BaseModel):
    """A body that a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = Field(None, description="One of the names in /v1/models; null is the first of them.")


def several_prompts(given: Prompt | list[Prompt]) -> list[Prompt]:
    """A list of prompts, also of one."""
    several = isinstance(given, list) and given and not isinstance(given[0], int)
    return given if several else [given]


class StreamOptions(BaseModel):
    model_config = Request.model_config

    include_usage: bool | None = Field(None, description="End with an event that holds the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every event holds the usage so far.")


class IgnoredFields(Request):
    """OpenAI's fields that change nothing in an answer."""

    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class SamplingFields(Request):
    """Fields that go to `SamplingParams` under their own names."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Count | None = Field(None, description="Log-probabilities of the prompt; not in streams.")
    priority: int | None = Field(None, description="Lower goes first; needs a scheduling policy that knows it.")
    cache_salt: str | None = Field(None, description="Cached prefixes are shared only under the same salt.")
    speculative: bool | None = Field(None, description="False: no drafts for this request. The tokens are the same.")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="The form of the answer: one of json, regex, choice, grammar, json_object, structural_tag."
    )


class GenerationRequest(SamplingFields, IgnoredFields):
    """What completions and chats have in common."""

    response_format: ResponseFormat | None = None
    use_beam_search: bool | None = Field(None, description="The n likeliest answers; not in streams.")
    length_penalty: float | None = Field(None, description="Of beams: the power of the length that scores are over.")
    early_stopping: bool | Literal["never"] | None = Field(None, description="Of beams, as transformers has it.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = Field(None, ge=1, description="Tokens that are joined into one event.")
    user: str | None = Field(None, description="The tenant under scheduling_policy 'fair' without API keys.")

    @property
    def usage_at_end(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_always(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling_params(self, defaults: SamplingParams, *, tenant: str = "") -> SamplingParams:
        """The engine's parameters; what the request leaves open is as `defaults` say. ValueError for what cannot be."""
        raise NotImplementedError

    def beam_search(self, params: SamplingParams, *, tenant: str = "") -> BeamSearchParams | None:
        """The search that is asked for, `params` being those of the request; None for none. ValueError for fields that
        do not go with one."""
        own = {name: getattr(self, name) for name in ("length_penalty", "early_stopping")}
        given = {name: value for name, value in own.items() if value is not None}
        if not self.use_beam_search:
            for name, value in given.items():
                require(False, name, value, "left out unless use_beam_search is true")
            return None
        for name in type(self).model_fields.keys() - WITH_BEAMS:
            value = getattr(self, name)
            allowed = value is None or value is False or value in NEUTRAL.get(name, ())
            require(allowed, name, value, "left out where use_beam_search is true")
        widest = "n" if getattr(self, "best_of", None) is None else "best_of"
        width = params.n if widest == "n" else self.best_of
        require(params.n <= width <= MAX_BEAMS, widest, width, f"an integer from n={params.n} to {MAX_BEAMS}")
        shared = {name: getattr(params, name) for name in ("n", "ignore_eos", "priority", "cache_salt")}
        most = INT32_MAX if params.max_tokens is None else params.max_tokens
        return BeamSearchParams(beam_width=width, max_tokens=most, tenant=tenant, **shared, **given)

    def _params(self, defaults: SamplingParams, tenant: str, **changes: Any) -> SamplingParams:
        if not self.stream:
            for field in ("stream_options", "stream_interval"):
                require(getattr(self, field) is None, field, getattr(self, field), "left out unless stream is true")
        elif self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: not supported in streams: it must be left out where stream is true")
        given = {name: getattr(self, name) for name in SAMPLING_NAMES if getattr(self, name) is not None}
        form = None if self.response_format is None else self.response_format.form()
        if form is not None:
            given_too = "structured_outputs" in given
            require(not given_too, "response_format", self.response_format.type, "left out beside structured_outputs")
            given["structured_outputs"] = form
        return replace(defaults, tenant=tenant, **{**given, **changes})

    def _refuse(self, **neutral: tuple) -> None:
        """ValueError for a field whose value asks for something that there is not."""
        for name, allowed in neutral.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ValueError(f"{name}: not supported: it must be left out")


SAMPLING_NAMES = tuple(name for name in SamplingFields.model_fields if name != "model")
# Accepted and ignored: they change nothing in an answer. `user` counts under scheduling_policy "fair".
WITHOUT_EFFECT = ("user", *(name for name in IgnoredFields.model_fields if name != "model"))
# What else goes with beams: a search has neither temperature nor chance, and the model's own distribution.
WITH_BEAMS = frozenset(
    (
        *("model", "prompt", "messages", "n", "best_of", "max_tokens", "max_completion_tokens", "ignore_eos", "seed"),
        *("use_beam_search", "length_penalty", "early_stopping", "priority", "cache_salt", "skip_special_tokens"),
        *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
        *("include_reasoning", *WITHOUT_EFFECT),
    )
)
NEUTRAL = {"temperature": (0, 1), "top_p": (1,), "frequency_penalty": (0,), "presence_penalty": (0,)}


class CompletionRequest(GenerationRequest):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Count | None = None
    echo: bool | None = None
    suffix: Any = Field(None, description="Not supported.")
    best_of: int | None = Field(None, description="With use_beam_search the beams that are followed; else only n.")

    def prompts(self) -> list[Prompt]:
        return several_prompts(self.prompt)

    def sampling_params(self, defaults: SamplingParams, *, tenant: str = "") -> SamplingParams:
        self._refuse(suffix=("",), best_of=(self.best_of if self.use_beam_search else self.n or 1,))
        changes = {"logprobs": self.logprobs}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            changes["prompt_logprobs"] = self.logprobs
        return self._params(defaults, tenant, **changes)


class ChatCompletionRequest(GenerationRequest):
    messages: list[dict[str, Any]] = Field(description="Objects with `role` and `content`, text or text parts.")
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, description="Only where the server trusts its clients' templates.")
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = Field(None, description="Null is 'auto'. 'required' and a name are enforced.")
    include_reasoning: bool | None = Field(None, description="False leaves out what the model thought.")
    functions: Any = Field(None, description="Not supported.")
    function_call: Any = Field(None, description="Not supported, unless it is 'none' or 'auto'.")
    modalities: Any = Field(None, description="Not supported, unless it is ['text'].")

    def sampling_params(self, defaults: SamplingParams, *, tenant: str = "") -> SamplingParams:
        self._refuse(functions=([],), function_call=("none", "auto"), modalities=(["text"],))
        check_tools(self.tools, self.tool_choice)
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: it must be left out unless logprobs is true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_completion_tokens: it must be max_tokens where both are given")
        said = defaults.max_tokens != SamplingParams().max_tokens
        most = limits.pop() if limits else defaults.max_tokens if said else None
        return self._params(
            defaults, tenant, max_tokens=most, logprobs=(self.top_logprobs or 0) if self.logprobs else None
        )

    @property
    def may_call(self) -> bool:
        """Whether the answer may hold tool calls."""
        return check_tools(self.tools, self.tool_choice)

    def rendering(self) -> dict[str, Any]:
        """The options of `ChatTemplate.prompt`."""
        continues = bool(self.continue_final_message)
        generation_prompt = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        options: dict[str, Any] = {"add_generation_prompt": generation_prompt, "continue_final_message": continues}
        if self.chat_template is not None:
            options["chat_template"] = self.chat_template
        if self.may_call:
            options["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return options | {"chat_template_kwargs": self.chat_template_kwargs}


class TokenizeRequest(Request):
    """A text, or a chat for the chat template."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = Field(None, description="True unless null; not for messages.")
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Request):
    tokens: list[int]


# ---- answers ------------------------------------------------------------------------------------------------


def _absent(value: Any) -> bool:
    """Whether a field is left out of the JSON instead of being null."""
    return value is None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(BaseModel):
    """`tokens` joined are the choice's text; `text_offset` are where they begin."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = Field(None, exclude_if=_absent)


class Answer(BaseModel):
    id: str
    created: int
    model: str


class Completion(Answer):
    """An answer, or an event of a stream: then the choices hold what is new."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = Field(None, exclude_if=_absent)


class TopLogprob(BaseModel):
    token: str
    bytes: list[int]
    logprob: float


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob] = []
    refusal: None = None


class FunctionCall(BaseModel):
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ChatToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = Field(None, exclude_if=_absent)
    tool_calls: list[ChatToolCall] | None = Field(None, exclude_if=_absent)


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = Field(None, exclude_if=_absent)


class ChatCompletion(Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage | None = Field(None, exclude_if=_absent)


class ToolCallDelta(ChatToolCall):
    """A whole call; `index` is its place in the message."""

    index: int


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = Field(None, exclude_if=_absent)
    content: str | None = Field(None, exclude_if=_absent)
    reasoning_content: str | None = Field(None, exclude_if=_absent)
    tool_calls: list[ToolCallDelta] | None = Field(None, exclude_if=_absent)


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: int | str | None = None


class ChatCompletionChunk(Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = Field(None, exclude_if=_absent)


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxserve"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(None, exclude_if=_absent)


class DetokenizeAnswer(BaseModel):
    prompt: str


class VersionAnswer(BaseModel):
    version: str


class StateAnswer(BaseModel):
    """Of /health and /ready. `done` of `total` programs are compiled while the status is "compiling"."""

    status: str
    done: int | None = Field(None, exclude_if=_absent)
    total: int | None = Field(None, exclude_if=_absent)
    error: str | None = Field(None, exclude_if=_absent)
