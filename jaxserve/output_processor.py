"""From a step's arrays to what users see: text, stop strings, log-probabilities."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.beam_search import Following, likeliest
from jaxserve.kernels_pallas.verify_draft.logprobs import Logprobs
from jaxserve.outputs import CompletionOutput, Logprob
from jaxserve.request import Request
from jaxserve.runner.inputs import ScoreRow
from jaxserve.runner.runner import StepResult
from jaxserve.scheduler.plan import StepPlan
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.stop_strings import StopStrings
from jaxserve.text.tokenizer import Tokenizer


class PromptRows(NamedTuple):
    """Which results of a step are log-probabilities of a request's prompt: positions `first` to `first + count - 1`
    stand in the scores from `row` on, and in the rows of the whole vocabulary from `whole` on."""

    first: int
    count: int
    row: int
    whole: int


class PooledRows(NamedTuple):
    """The hidden rows of a step from `row` on are those of a request's positions from `first` on."""

    first: int
    count: int
    row: int


class WantedRows(NamedTuple):
    """What the step computes besides sampling, in the order in which the results come back."""

    scores: list[ScoreRow]
    whole: list[int]  # query rows after which the whole vocabulary is wanted
    prompts: dict[Request, PromptRows]
    pooled: dict[Request, PooledRows]
    sampled_whole: dict[Request, int]  # where in `whole` the vocabulary of the first sampled token stands


def wanted_rows(plan: StepPlan) -> WantedRows:
    """What the requests of a plan ask for besides what the head gives: log-probabilities and hidden states."""
    wanted = WantedRows([], [], {}, {}, {})
    row = 0
    for entry in plan.entries if plan.wants_rows else ():
        request = entry.request
        if request.prompt_logprobs is not None and (position := request.next_to_score) is not None:
            # The hidden state at a position tells of the token after it.
            first, end = max(position, entry.start + 1), min(entry.start + entry.count + 1, request.num_prompt_tokens)
            if first < end:
                rows = range(row + first - 1 - entry.start, row + end - 1 - entry.start)
                top = request.params.prompt_logprobs
                wanted.prompts[request] = PromptRows(first, end - first, len(wanted.scores), len(wanted.whole))
                tokens = request.prompt_token_ids[first:end]
                wanted.scores.extend(ScoreRow(at, token, max(top, 0)) for at, token in zip(rows, tokens, strict=True))
                wanted.whole.extend(rows if top < 0 else ())
        if request.pooled is not None and (position := request.pooled.next_position) is not None:
            first, end = max(position, entry.start), entry.start + entry.count
            if first < end:
                wanted.pooled[request] = PooledRows(first, end - first, row + first - entry.start)
        row += entry.count
        if entry.sample and request.params.logprobs == -1:
            wanted.sampled_whole[request] = len(wanted.whole)
            wanted.whole.extend(range(row - 1, row + entry.drafts))
        row += entry.drafts
    return wanted


def _following(request: Request, result: StepResult, row: int, whole: int) -> Following:
    """What may follow a beam, whose token stands in `row`, or in `whole` of those with the whole vocabulary."""
    count = request.params.logprobs
    if count < 0:
        return likeliest(result.whole[whole], request.num_following)
    return Following(result.logprobs.top_ids[row, :count], result.logprobs.top_logprobs[row, :count])


class RequestText:
    """The text of one branch as it grows."""

    def __init__(self, tokenizer: Tokenizer, request: Request):
        params = request.params
        self._request = request
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self.stopped = False  # by a stop string

    def push(self, token: int, num_output_tokens: int, *, last: bool) -> str:
        """The text that has become certain with this token, the `num_output_tokens`-th of the output; a stop string in
        it ends the request.

        `last`: what ended the request is known of this token by its id. It is then part of the text only if
        `include_stop_str_in_output`.
        """
        request = self._request
        ended = last and request.finish_reason is not None
        by_id = ended and request.finish_reason == "stop" and token in request.stop_token_ids
        shown = [] if by_id and not request.params.include_stop_str_in_output else [token]
        text = self._detokenizer.push(shown)
        if ended:
            text += self._detokenizer.flush()
        if self._stops is None:
            return text
        may_stop = not by_id and num_output_tokens > request.params.min_tokens
        certain = self._stops.push(text, may_stop=may_stop)
        if certain.stop is not None:
            request.finish_reason, request.stop_reason = "stop", certain.stop
            self.stopped = True
            return certain.text
        return certain.text + (self._stops.flush() if ended else "")

    def flush(self) -> str:
        """What is still held back, for a request that ends without a token of its own (an abort, an error)."""
        rest = self._detokenizer.flush()
        return rest if self._stops is None else self._stops.push(rest, may_stop=False).text + self._stops.flush()


class OutputProcessor:
    """Makes outputs of tokens and log-probabilities; `tokenizer` None leaves all texts empty."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._texts: dict[Request, RequestText] = {}

    def add(self, request: Request) -> None:
        if self._tokenizer is not None:
            self._texts[request] = RequestText(self._tokenizer, request)

    def forget(self, request: Request) -> None:
        self._texts.pop(request, None)

    def clear(self) -> None:
        self._texts.clear()

    def flush(self, request: Request) -> str:
        text = self._texts.get(request)
        return "" if text is None else text.flush()

    def completion(
        self, request: Request, tokens: list[int], result: StepResult, row: int, whole: int, version: int
    ) -> CompletionOutput:
        """What the tokens add that a request has just taken, sampled by weights of `version`; the first stands in
        `row` of the sampled rows and in `whole` of those with the whole vocabulary.

        A stop string may end the request here: it then gives back the tokens behind it. A beam is told what may
        follow it, and nothing else.
        """
        if request.num_following:
            request.following = _following(request, result, row, whole)
            return CompletionOutput(request.index, token_ids=tokens)
        text, pushed, logprobs, cumulative = self._texts.get(request), "", None, None
        if text is not None:
            pushed = self._push(text, request, tokens)
        if request.params.logprobs is not None:
            logprobs = self._sampled_logprobs(request, tokens, result, row, whole)
            cumulative = sum(entry[token].logprob for entry, token in zip(logprobs, tokens, strict=True))
        reason, stop = request.finish_reason, request.stop_reason
        versions = [version] * len(tokens)
        return CompletionOutput(request.index, pushed, tokens, logprobs, cumulative, reason, stop, None, versions)

    @staticmethod
    def _push(text: RequestText, request: Request, tokens: list[int]) -> str:
        """The text that the tokens add; those behind a stop string are taken back."""
        pushed, before = "", len(request.token_ids) - request.num_prompt_tokens - len(tokens)
        for index, token in enumerate(tokens, 1):
            pushed += text.push(token, before + index, last=index == len(tokens))
            if text.stopped:
                surplus = len(tokens) - index
                if surplus:
                    del request.token_ids[-surplus:], tokens[-surplus:]
                break
        return pushed

    def _sampled_logprobs(
        self, request: Request, tokens: list[int], result: StepResult, row: int, whole: int
    ) -> list[dict[int, Logprob]]:
        wanted = request.params.logprobs
        everything = (lambda index: result.whole[whole + index]) if wanted < 0 else lambda index: None
        return [
            self._logprobs(token, result.logprobs, row + index, wanted, everything(index))
            for index, token in enumerate(tokens)
        ]

    def take_prompt(self, request: Request, wanted: WantedRows, result: StepResult) -> None:
        """Take what a step tells of a request's prompt; what is known from before a preemption is the same."""
        if (rows := wanted.prompts.get(request)) is not None:
            self._score(request, rows, result)
        if (pooled := wanted.pooled.get(request)) is not None:
            request.pooled.take(pooled.first, result.hidden[pooled.row : pooled.row + pooled.count])

    def _score(self, request: Request, rows: PromptRows, result: StepResult) -> None:
        wanted = request.params.prompt_logprobs
        for index in range(rows.count):
            if request.next_to_score == rows.first + index:
                token = request.prompt_token_ids[rows.first + index]
                everything = result.whole[rows.whole + index] if wanted < 0 else None
                request.prompt_logprobs.append(
                    self._logprobs(token, result.scores, rows.row + index, wanted, everything)
                )

    def _logprobs(
        self, token: int, found: Logprobs, row: int, count: int, everything: np.ndarray | None
    ) -> dict[int, Logprob]:
        """The token itself first, then the `count` likeliest or, with `everything` [vocab], all others."""
        entries = {token: Logprob(float(found.token_logprob[row]), int(found.rank[row]), self._text(token))}
        if everything is None:
            ids, values = found.top_ids[row, :count].tolist(), found.top_logprobs[row, :count].tolist()
            ranks: Sequence[int] = range(1, len(ids) + 1)
        else:
            order = np.argsort(-everything, kind="stable")
            ids, ordered = order.tolist(), everything[order]
            values = ordered.tolist()
            ranks = (1 + np.searchsorted(-ordered, -ordered, side="left")).tolist()
        for rank, token_id, logprob in zip(ranks, ids, values, strict=True):
            entries.setdefault(token_id, Logprob(logprob, rank, self._text(token_id)))
        return entries

    def _text(self, token: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.token_text(token)
