"""What an assistant's message is made of as its text grows: thoughts, content, tool calls. Knows no HTTP."""

from typing import NamedTuple

from jaxserve.server.reasoning import ReasoningReader
from jaxserve.server.tool_calls import ToolCall, ToolCallReader


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
