"""`/v1/responses`: a request as a chat, and the chat's answer as a response and its events. Knows no HTTP.

Nothing is stored: a client sends the whole conversation.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxserve.outputs import RequestOutput
from jaxserve.server.answers import ChatBuilder
from jaxserve.server.forms import (
    MAX_TOOLS,
    STRICT,
    Function,
    FunctionChoice,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    ToolDefinition,
)
from jaxserve.server.protocol import ChatChunkChoice, ChatCompletionRequest, IgnoredFields
from jaxserve.text.chat_template import ROLES
from jaxserve.validation import require


class TextFormat(BaseModel):
    """`response_format` as this path writes it."""

    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def response_format(self) -> ResponseFormat:
        schema = JsonSchema(name=self.name, schema=self.schema_)
        given = self.type == "json_schema" or schema != JsonSchema()
        return ResponseFormat(type=self.type, json_schema=schema if given else None)


class TextOptions(BaseModel):
    model_config = STRICT

    format: TextFormat | None = None
    verbosity: str | None = Field(None, description="Without effect.")


class FunctionTool(Function):
    type: Literal["function"]


class NamedFunctionTool(BaseModel):
    model_config = STRICT

    type: Literal["function"]
    name: str


class ResponsesRequest(IgnoredFields):
    """OpenAI's fields for text and functions, and some of `SamplingParams`. `metadata` comes back."""

    input: str | list[dict[str, Any]] = Field(description="A text, or messages, function calls and their outputs.")
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    user: str | None = None

    def chat(self) -> ChatCompletionRequest:
        """The same as a chat. ValueError for input that is none."""
        same = ("model", "temperature", "top_p", "top_k", "seed", "logit_bias", "ignore_eos", "stream", "user")
        fields = {name: getattr(self, name) for name in (*same, "chat_template_kwargs", "parallel_tool_calls")}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.response_format()
        if self.tools is not None:
            functions = [Function(**tool.model_dump(exclude={"type"})) for tool in self.tools]
            fields["tools"] = [ToolDefinition(type="function", function=function) for function in functions]
        fields["tool_choice"] = self.tool_choice
        if isinstance(self.tool_choice, NamedFunctionTool):
            fields["tool_choice"] = NamedTool(type="function", function=FunctionChoice(name=self.tool_choice.name))
        given = {name: value for name, value in fields.items() if value is not None}
        return ChatCompletionRequest(messages=self.messages(), max_tokens=self.max_output_tokens, **given)

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as a chat's messages; calls that follow each other are one message."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions is not None else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for index, item in enumerate(items):
            message = _message(item, f"input[{index}]")
            if message is None:
                continue
            if "tool_calls" in message and messages and "tool_calls" in messages[-1]:
                messages[-1]["tool_calls"] += message["tool_calls"]
            else:
                messages.append(message)
        return messages


def _message(item: dict[str, Any], field: str) -> dict[str, Any] | None:
    """An item of the input as a message; None for thoughts, which templates do not take back."""
    kind = item.get("type", "message")
    known = ("message", "function_call", "function_call_output", "reasoning")
    require(kind in known, f"{field}.type", kind, f"one of {', '.join(known)}")
    if kind == "reasoning":
        return None
    text = lambda name: _text(item.get(name), f"{field}.{name}")
    if kind == "function_call":
        function = {"name": text("name"), "arguments": text("arguments")}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": text("call_id"), "type": "function", "function": function}],
        }
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": text("call_id"), "content": text("output")}
    # Known before it is one of a chat's messages, which count `instructions` and not the reasoning.
    role = item.get("role")
    require(isinstance(role, str) and role in ROLES, f"{field}.role", role, f"one of {', '.join(map(repr, ROLES))}")
    return {"role": role, "content": text("content")}


def _text(content: Any, field: str) -> str:
    """A text, or the texts of its parts."""
    if isinstance(content, str):
        return content
    rule = "a text or a list of parts with texts"
    require(isinstance(content, list), field, content, rule)
    for index, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type") in ("input_text", "output_text", "text")
        require(is_text and isinstance(part.get("text"), str), f"{field}[{index}]", part, rule)
    return "\n".join(part["text"] for part in content)


# ---- answers ------------------------------------------------------------------------------------------------


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []


class MessageItem(BaseModel):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    content: list[OutputText] = []


class FunctionCallItem(BaseModel):
    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed"] = "completed"


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class ReasoningItem(BaseModel):
    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any] = []
    content: list[ReasoningText] = []


class InputTokensDetails(BaseModel):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseAnswer(BaseModel):
    """`output` holds the parts in the order in which they began."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    output: list[MessageItem | FunctionCallItem | ReasoningItem] = []
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    tool_choice: str | NamedFunctionTool = "auto"
    tools: list[FunctionTool] = []
    usage: ResponseUsage | None = None


class Event(BaseModel):
    """An event of a stream: what else it holds depends on its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class ResponseBuilder(ChatBuilder):
    """A response in the making: the parts of the chat's answer as items."""

    prefix = "resp"

    def __init__(self, asked: ResponsesRequest, request: ChatCompletionRequest, *arguments: Any, **options: Any):
        super().__init__(request, *arguments, **options)
        self._answer = ResponseAnswer(
            id=self._head["id"],
            created_at=self._head["created"],
            model=self._head["model"],
            instructions=asked.instructions,
            metadata=asked.metadata,
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            temperature=self.params.temperature,
            top_p=self.params.top_p,
            max_output_tokens=asked.max_output_tokens,
            tool_choice=asked.tool_choice or "auto",
            tools=asked.tools or [],
        )
        self._sequence = 0

    def whole(self, outputs: Sequence[RequestOutput]) -> ResponseAnswer:
        self.events(0, outputs[0])
        return self._answer

    def events(self, prompt: int, output: RequestOutput) -> list[Event]:
        events = []
        if self._sequence == 0:
            events += [self._event_of("response.created"), self._event_of("response.in_progress")]
        for choice in self._new(prompt, output):
            if choice is not None:
                events += self._of_choice(choice)
        return events

    def _of_choice(self, choice: ChatChunkChoice) -> list[Event]:
        delta, events = choice.delta, []
        if delta.reasoning_content:
            events += self._grow("reasoning", delta.reasoning_content)
        if delta.content:
            events += self._grow("message", delta.content)
        for call in delta.tool_calls or ():
            item = FunctionCallItem(
                id=f"fc_{call.id}", call_id=call.id, name=call.function.name, arguments=call.function.arguments
            )
            events += self._call(item)
        if choice.finish_reason is not None:
            events += self._end(cut=choice.finish_reason == "length")
        return events

    def _grow(self, kind: str, text: str) -> list[Event]:
        """Text for the item of a kind, which begins with it."""
        events, items = [], self._answer.output
        where = next((place for place, item in enumerate(items) if item.type == kind), len(items))
        name = "output_text" if kind == "message" else "reasoning_text"
        if where == len(items):
            identity = f"{'msg' if kind == 'message' else 'rs'}_{self._answer.id}"
            items.append((MessageItem if kind == "message" else ReasoningItem)(id=identity))
            events.append(self._item_event("added", where, items[where].model_copy(deep=True)))
            items[where].content = [OutputText() if kind == "message" else ReasoningText()]
            events.append(self._part_event("added", where))
        items[where].content[0].text += text
        place = {"item_id": items[where].id, "output_index": where, "content_index": 0}
        more = {"logprobs": []} if kind == "message" else {}
        return [*events, self._event_of(f"response.{name}.delta", delta=text, **place, **more)]

    def _call(self, item: FunctionCallItem) -> list[Event]:
        where = len(self._answer.output)
        self._answer.output.append(item)
        place = {"item_id": item.id, "output_index": where}
        begun = item.model_copy(update={"arguments": "", "status": "in_progress"})
        return [
            self._item_event("added", where, begun),
            self._event_of("response.function_call_arguments.delta", delta=item.arguments, **place),
            self._event_of("response.function_call_arguments.done", arguments=item.arguments, name=item.name, **place),
            self._item_event("done", where, item),
        ]

    def _end(self, *, cut: bool) -> list[Event]:
        events, answer = [], self._answer
        for where, item in enumerate(answer.output):
            if isinstance(item, FunctionCallItem):
                continue
            name, more = ("output_text", {"logprobs": []}) if item.type == "message" else ("reasoning_text", {})
            place = {"item_id": item.id, "output_index": where, "content_index": 0}
            events.append(self._event_of(f"response.{name}.done", text=item.content[0].text, **place, **more))
            events.append(self._part_event("done", where))
            if isinstance(item, MessageItem):
                item.status = "incomplete" if cut else "completed"
            events.append(self._item_event("done", where, item))
        answer.status = "incomplete" if cut else "completed"
        answer.incomplete_details = IncompleteDetails() if cut else None
        answer.usage = ResponseUsage(
            input_tokens=self.num_prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=self.num_cached_tokens),
            output_tokens=self.num_output_tokens,
            total_tokens=self.num_prompt_tokens + self.num_output_tokens,
        )
        return [*events, self._event_of(f"response.{answer.status}")]

    def _item_event(self, what: str, where: int, item: BaseModel) -> Event:
        return self._event_of(f"response.output_item.{what}", output_index=where, item=item.model_dump())

    def _part_event(self, what: str, where: int) -> Event:
        item = self._answer.output[where]
        place = {"item_id": item.id, "output_index": where, "content_index": 0}
        return self._event_of(f"response.content_part.{what}", part=item.content[0].model_dump(), **place)

    def _event_of(self, kind: str, **fields: Any) -> Event:
        if kind in ("response.created", "response.in_progress", "response.completed", "response.incomplete"):
            fields["response"] = self._answer.model_dump()
        event = Event(type=kind, sequence_number=self._sequence, **fields)
        self._sequence += 1
        return event
