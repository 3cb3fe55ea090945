"""What an assistant's message is made of as its text grows: thoughts, content, tool calls. Knows no HTTP."""

from typing import NamedTuple

from jaxserve.server.forms import ToolCalling
from jaxserve.server.protocol import ChatCompletionRequest
from jaxserve.server.reasoning import ReasoningReader
from jaxserve.server.tool_calls import FORMATS, ToolCall, ToolCallReader, format_of_template
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer


class Parts(NamedTuple):
    content: str
    reasoning: str
    calls: list[ToolCall]


class MessageReader:
    """Reads the text of one choice; None for what it is not to look for."""

    def __init__(
        self,
        reasoning: ReasoningReader | None = None,
        tools: ToolCallReader | None = None,
        *,
        shows_reasoning: bool = True,
    ):
        self._reasoning, self._tools, self._shows_reasoning = reasoning, tools, shows_reasoning
        self.num_calls = 0

    @property
    def reads(self) -> bool:
        """Whether the text may be more than content."""
        return self._reasoning is not None or self._tools is not None

    def push(self, text: str, *, final: bool) -> Parts:
        """What has become certain."""
        thought, calls = "", []
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text, final=final)
        if self._tools is not None:
            text, calls = self._tools.push(text, final=final)
        self.num_calls += len(calls)
        return Parts(text, thought if self._shows_reasoning else "", calls)


def tool_calling(
    request: ChatCompletionRequest,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    chat_template: str | None = None,
    parser: str | None = None,
) -> ToolCalling | None:
    """The tool calls that the answer to a chat may hold, in the format `parser` or that of the template; None for none.

    `chat_template` takes the place of the model's own. ValueError where the template knows no tools.
    """
    if not request.may_call:
        return None
    source = template.chosen(chat_template, tools=True)
    if "tools" not in source:
        raise ValueError("tools: not supported: the chat template of this model takes none")
    tool_format = FORMATS[parser or format_of_template(source)](tokenizer.special_tokens)
    parallel = request.parallel_tool_calls is not False
    return ToolCalling(tool_format, request.tools, request.tool_choice, parallel=parallel)
