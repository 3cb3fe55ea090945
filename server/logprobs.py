"""Log-probabilities in OpenAI's two shapes: the lists of completions and the entries of chats. Knows no HTTP."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxserve.outputs import CompletionOutput, Logprob
from jaxserve.server.protocol import ChatLogprob, CompletionLogprobs, PromptLogprob, PromptLogprobs, TopLogprob
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.tokenizer import Tokenizer

_LEAST = -9999.0  # what JSON gets for minus infinity, as OpenAI writes it

Entry = Mapping[int, Logprob]


def finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text, or "bytes:\\xe2\\x80" if that is no whole characters, or "token_id:7": names stay apart."""
    raw = tokenizer.token_bytes(token_id)
    if not raw:
        return f"token_id:{token_id}"
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass(slots=True)
class _Part:
    """What a token adds to a text from character `start` on."""

    token_id: int
    entry: Entry | None
    start: int
    text: str


class CompletionLogprobsWriter:
    """The lists of one choice, handed out as its text is: for any way of streaming, `tokens` joined are the text.

    A token whose characters are not complete, or are held back because they may become a stop string, waits.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, start: int = 0):
        """`start`: the length of the text before, which is the prompt's if it is echoed."""
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._waiting: deque[_Part] = deque()
        self._end = self._shown = start

    def push(self, output: CompletionOutput) -> CompletionLogprobs:
        """The entries whose text is out now that `output` has come."""
        for token_id, entry in zip(output.token_ids, output.logprobs or (), strict=True):
            part = _Part(token_id, entry, self._end, self._detokenizer.push([token_id]))
            self._end += len(part.text)
            self._waiting.append(part)
        self._shown += len(output.text)
        if output.finished and self._waiting:
            self._waiting[-1].text += self._detokenizer.flush()
        return _lists(self._tokenizer, self._released(output.finished))

    def _released(self, everything: bool) -> Iterable[_Part]:
        while self._waiting:
            part = self._waiting[0]
            incomplete = len(self._waiting) == 1 and self._detokenizer.pending
            if not everything and (incomplete or part.start + len(part.text) > self._shown):
                return
            self._waiting.popleft()
            part.text = part.text[: max(self._shown - part.start, 0)]  # what a stop string cut off is nobody's
            part.start = min(part.start, self._shown)
            yield part


def prompt_parts(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> list[str]:
    """The text of each prompt token; a beginning-of-sequence token, which no user writes, has none."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    first_is_bos = prompt_token_ids[0] == tokenizer.bos_token_id
    texts = ["" if first_is_bos and not index else detokenizer.push([i]) for index, i in enumerate(prompt_token_ids)]
    texts[-1] += detokenizer.flush()
    return texts


def echoed_logprobs(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], texts: Sequence[str], entries: Sequence[Entry | None]
) -> CompletionLogprobs:
    """The lists for an echoed prompt: the first token has no log-probability."""
    parts, start = [], 0
    for token_id, entry, text in zip(prompt_token_ids, entries, texts, strict=True):
        parts.append(_Part(token_id, entry, start, text))
        start += len(text)
    return _lists(tokenizer, parts)


def _lists(tokenizer: Tokenizer, parts: Iterable[_Part]) -> CompletionLogprobs:
    lists = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for part in parts:
        lists.tokens.append(part.text)
        lists.text_offset.append(part.start)
        lists.token_logprobs.append(None if part.entry is None else finite(part.entry[part.token_id].logprob))
        lists.top_logprobs.append(None if part.entry is None else _by_name(tokenizer, part.entry))
    return lists


def _by_name(tokenizer: Tokenizer, entry: Entry) -> dict[str, float]:
    names: dict[str, float] = {}
    for token_id, found in entry.items():
        names.setdefault(token_name(tokenizer, token_id), finite(found.logprob))
    return names


def joined(first: CompletionLogprobs, then: CompletionLogprobs) -> CompletionLogprobs:
    names = CompletionLogprobs.model_fields
    return CompletionLogprobs(**{name: getattr(first, name) + getattr(then, name) for name in names})


def chat_logprobs(tokenizer: Tokenizer, output: CompletionOutput, top: int) -> list[ChatLogprob]:
    """An entry per token, with the `top` likeliest ones. `bytes` joined are the text."""
    entries = []
    for token_id, entry in zip(output.token_ids, output.logprobs or (), strict=True):
        tops = [_chat_token(tokenizer, i, found) for i, found in entry.items() if found.rank <= top][:top]
        tops.sort(key=lambda token: -token.logprob)
        own = _chat_token(tokenizer, token_id, entry[token_id])
        entries.append(ChatLogprob(token=own.token, bytes=own.bytes, logprob=own.logprob, top_logprobs=tops))
    return entries


def _chat_token(tokenizer: Tokenizer, token_id: int, found: Logprob) -> TopLogprob:
    raw = tokenizer.token_bytes(token_id)
    return TopLogprob(token=raw.decode(errors="replace"), bytes=list(raw), logprob=finite(found.logprob))


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[Entry | None]) -> PromptLogprobs:
    """The engine's own shape, as vLLM gives it: by token id."""
    return [
        None if entry is None else {str(i): _prompt_token(found) for i, found in entry.items()} for entry in entries
    ]


def _prompt_token(found: Logprob) -> PromptLogprob:
    return PromptLogprob(logprob=finite(found.logprob), rank=found.rank, decoded_token=found.decoded_token)
