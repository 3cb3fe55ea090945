"""The part of a text in which a model thinks, told from its answer. Knows no HTTP."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from jaxserve.structured.grammars import WHITESPACE, up_to
from jaxserve.text.stop_strings import held_back

BEGIN, END = "<think>", "</think>"
SPACE = " \n\r\t"
# vLLM's names: whether the text begins within the thoughts although it does not say so.
PARSERS = {"deepseek_r1": True, "qwen3": False}


class Split(NamedTuple):
    reasoning: str
    content: str


def shows_special_tokens(special_tokens: Collection[str]) -> bool:
    """Whether a text must hold the special tokens for the thoughts to be told from the answer."""
    return BEGIN in special_tokens or END in special_tokens


def thoughts_grammar(special_tokens: Mapping[str, int], *, begun: bool) -> str:
    """The rule `thoughts` of a Lark grammar, and those that it needs: what a `ReasoningReader` takes for thoughts."""
    rules = [
        "thoughts: " + ("begin? end SPACE?" if begun else "(begin end SPACE?)?"),
        up_to("begin", "SPACE?", BEGIN, special_tokens),
        up_to("end", "THOUGHT", END, special_tokens),
        "THOUGHT: /(.|\\n)*/",
        f"SPACE: /{WHITESPACE}/",
    ]
    return "\n".join(rules)


class ReasoningReader:
    """Splits one choice's text as it grows. White space around the thoughts belongs to neither part."""

    def __init__(self, *, begun: bool):
        """`begun`: the text begins within the thoughts, whether it says so or not."""
        self._begun = begun
        self._text, self._space, self._state = "", "", self._before
        self._thought = False  # whether a thought has been seen

    def push(self, text: str, *, final: bool) -> Split:
        """What has become certain."""
        self._text += text
        reasoning = content = ""
        while True:
            state = self._state
            split = state(final)
            reasoning, content = reasoning + split.reasoning, content + split.content
            if self._state == state:
                return Split(reasoning, content)

    def _before(self, final: bool) -> Split:
        body = self._text.lstrip(SPACE)
        if body.startswith(BEGIN):
            self._text, self._state = body.removeprefix(BEGIN), self._thinking
        elif final or not BEGIN.startswith(body):
            self._state = self._thinking if self._begun else self._answering
        return Split("", "")

    def _thinking(self, final: bool) -> Split:
        thought, found, rest = self._text.partition(END)
        if found:
            self._text, self._state = rest, self._after
            return Split(self._shown(thought), "")
        held = 0 if final else held_back(thought, [END])
        self._text = thought[len(thought) - held :]
        return Split(self._shown(thought[: len(thought) - held]), "")

    def _shown(self, thought: str) -> str:
        """What is to be seen of a thought; the white space at its end is held until it is known what follows."""
        text = self._space + thought
        text = text if self._thought else text.lstrip()
        shown = text.rstrip()
        self._space, self._thought = text[len(shown) :], self._thought or shown != ""
        return shown

    def _after(self, final: bool) -> Split:
        self._text = self._text.lstrip(SPACE)
        if self._text:
            self._state = self._answering
        return Split("", "")

    def _answering(self, final: bool) -> Split:
        content, self._text = self._text, ""
        return Split("", content)
