"""Chats to prompts: messages go through the model's own chat template, rendered by transformers.

transformers takes seconds to import, so it is loaded for the first chat. It only renders: the text becomes token
ids by the engine's tokenizer, without special tokens of its own, since a template writes all that it wants.
"""

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, no_type_check

from jaxserve.text.tokenizer import Tokenizer, check_unicode
from jaxserve.validation import require

ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # OpenAI's

Message = Mapping[str, Any]


class ChatTemplate:
    """The chat template of a tokenizer. Rendering has no state: one object serves any number of chats."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    @no_type_check  # it checks itself: the tests' type checker would come first with another error
    def render(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any] | Callable] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat. Names and meanings are those of transformers' `apply_chat_template`.

        `messages` are dicts with "role" and "content", text or OpenAI's list of text parts; what else they hold is
        for the template, as is `chat_template_kwargs`. `chat_template` (a template, or the name of one of the
        model's) takes the place of the model's own. Raises ValueError for messages that are none, where there is no
        template, and with the template's own words where it refuses the chat.
        """
        if add_generation_prompt and continue_final_message:
            raise ValueError("continue_final_message=True: add_generation_prompt must be False with it, not True")
        chat = _checked(messages)
        extra = dict(chat_template_kwargs or {})
        named = set(inspect.signature(self._renderer.apply_chat_template).parameters) - {"documents", "kwargs"}
        reserved = sorted((named | {"messages"}) & extra.keys())
        require(not reserved, "chat_template_kwargs", reserved, "names that only the template knows")
        if chat_template is None and self._renderer.chat_template is None:
            raise ValueError(
                "messages: this model's tokenizer has no chat template: give one as chat_template, or a prompt"
            )
        try:
            return self._renderer.apply_chat_template(
                chat,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=None if tools is None else list(tools),
                tokenize=False,
                **extra,
            )
        except Exception as error:  # a template is a program: it may fail in any way, and says why in its own words
            raise ValueError(f"messages: the chat template refuses them: {error}") from error

    @no_type_check
    def prompt(self, messages: Sequence[Message], **options: Any) -> dict[str, Any]:
        """A chat as the engine takes it: its text and its token ids. `options` are those of `render`."""
        text = self.render(messages, **options)
        ids = self._tokenizer.encode(text, add_special_tokens=False, field="messages")
        return {"prompt": text, "prompt_token_ids": ids}

    @property
    def source(self) -> str | None:
        """The model's own template; None if it has none."""
        return self._renderer.chat_template

    def chosen(self, chat_template: str | None = None, *, tools: bool = False) -> str:
        """The template that `render` would take. ValueError where there is none."""
        return self._renderer.get_chat_template(chat_template, tools=[{}] if tools else None)

    @cached_property
    def _renderer(self):
        """The transformers tokenizer that knows the template and the special tokens it may name."""
        with _no_advice():
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if self._tokenizer.folder is None:  # made in the program: it has no template of its own
            return PreTrainedTokenizerFast(tokenizer_object=self._tokenizer.backend)
        return AutoTokenizer.from_pretrained(self._tokenizer.folder)


@no_type_check
def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them, each with a known role and text for content."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    require(is_list and len(messages) > 0, "messages", messages, "a list of at least one message")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


@no_type_check
def _checked_message(message: Message, field: str) -> dict[str, Any]:
    require(isinstance(message, Mapping), field, message, "a dict with 'role' and 'content'")
    message = dict(message)
    role = message.get("role")
    require(isinstance(role, str) and role in ROLES, f"{field}.role", role, f"one of {', '.join(map(repr, ROLES))}")
    calls = message.get("tool_calls") or []
    require(isinstance(calls, list | tuple), f"{field}.tool_calls", calls, "a list")
    if message.get("content") is None:
        beside_calls = role == "assistant" and len(calls) > 0
        require(beside_calls, f"{field}.content", None, "text, except beside tool_calls")
        message["content"] = ""  # most templates concatenate it
    else:
        message["content"] = _text(message["content"], f"{field}.content")
    if calls:
        message["tool_calls"] = [_parsed_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return message


@no_type_check
def _text(content: str | Sequence[Mapping], field: str) -> str:
    """Text, or a list of text parts joined by line breaks, as vLLM joins them."""
    if isinstance(content, str):
        check_unicode(content, field)
        return content
    require(isinstance(content, list | tuple), field, content, "text or a list of text parts")
    for index, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        require(is_text, f"{field}[{index}]", part, "a text part, {'type': 'text', 'text': ...}")
        check_unicode(part["text"], f"{field}[{index}].text")
    return "\n".join(part["text"] for part in content)


@no_type_check
def _parsed_call(call: Mapping, field: str) -> dict[str, Any]:
    """A tool call with its arguments as a dict: OpenAI writes them as JSON text, templates print them as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    require(isinstance(function, Mapping), field, call, "a dict with 'function'")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{field}.function.arguments must be JSON: {error}") from None
    return {**call, "function": {**function, "arguments": arguments}}


@contextmanager
def _no_advice():
    """Import transformers without its advice to install PyTorch, which nothing here needs."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
