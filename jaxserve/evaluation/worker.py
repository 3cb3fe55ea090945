"""Work of items through one engine: requests in, results as soon as an item has all its own."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, no_type_check

from jaxserve.engine import Engine
from jaxserve.evaluation.work import Result, Work
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.scoring import Score, score_of, scoring_params, split_tokens
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer


@dataclass
class _Open:
    """An item under way: its requests' ids, where scoring starts in each, and what has arrived."""

    work: Work
    started: float
    starts: list[int] = field(default_factory=list)
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)


class Worker:
    """Continuous batching over items. Items come back as they finish, in any order."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._next_id = 0
        self._open: dict[str, _Open] = {}  # by request
        self._refused: list[Result] = []
        self.num_prompt_tokens = self.num_output_tokens = 0

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return len(self._open)

    def advance(self, works: Sequence[Work] = ()) -> list[Result]:
        """Take in more items, then run until at least one item is finished, if any is open."""
        for work in works:
            self._add(work)
        done, self._refused = self._refused, []
        while not done and self._open:
            for output in self._engine.step():
                done += self._take(output)
        return done

    def _add(self, work: Work) -> None:
        item = _Open(work, time.monotonic())
        try:
            for prompt, params, start in self._requests(work):
                request_id = f"item-{self._next_id}"
                self._engine.add_request(request_id, prompt, params)
                self._next_id += 1
                self._open[request_id] = item
                item.outputs[request_id] = None
                item.starts.append(start)
        except ValueError as error:
            self._give_up(item)
            self._refused.append(Result(work.key, error=str(error)))

    def _give_up(self, item: _Open) -> None:
        for request_id in item.outputs:
            if self._open.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _requests(self, work: Work) -> list[tuple[Any, SamplingParams, int]]:
        """(prompt, parameters, where scoring starts) of everything that the item asks."""
        if work.kind == "generate":
            prompt = work.prompt if isinstance(work.prompt, str) else self._chat_template.prompt(work.prompt)
            return [(prompt, work.params, 0)]
        if work.kind == "score":
            pairs = [self._pair(work.prompt, answer) for answer in work.answers]
        else:
            ids = self._tokenizer.encode(work.prompt)
            pairs = windows(ids, work.window or self._engine.max_model_len, work.stride)
        return [(ids, scoring_params(start), start) for ids, start in pairs]

    def _pair(self, prompt: str | list, answer: str) -> tuple[list[int], int]:
        if isinstance(prompt, str):
            return split_tokens(prompt, answer, self._tokenizer)
        text = self._chat_template.render(prompt)
        return split_tokens(text, answer, self._tokenizer, add_special_tokens=False)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer)

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._engine.tokenizer is None:
            raise ValueError("prompt: it needs a tokenizer, and this engine has none")
        return self._engine.tokenizer

    def _take(self, output: RequestOutput) -> list[Result]:
        item = self._open.get(output.request_id)
        if item is None:  # given up
            return []
        known = item.outputs[output.request_id]
        if known is None:
            item.outputs[output.request_id] = output
        else:
            known.extend(output)
        self.num_output_tokens += sum(len(new.token_ids) for new in output.outputs)
        if not output.finished:
            return []
        self.num_prompt_tokens += len(output.prompt_token_ids)
        del self._open[output.request_id]
        if any(request_id in self._open for request_id in item.outputs):
            return []
        return [self._result(item)]

    def _result(self, item: _Open) -> Result:
        outputs, seconds = list(item.outputs.values()), time.monotonic() - item.started
        errors = [new.error for output in outputs for new in output.outputs if new.error is not None]
        if errors:
            return Result(item.work.key, error=errors[0], seconds=seconds)
        if item.work.kind == "generate":
            values = _generated(outputs[0])
        else:
            scores = [score_of(output, start) for output, start in zip(outputs, item.starts, strict=True)]
            values = _scored(scores) if item.work.kind == "score" else _rated(scores)
        return Result(item.work.key, values, seconds=seconds)


def _generated(output: RequestOutput) -> dict[str, Any]:
    [answer] = output.outputs
    return {
        "output": answer.text,
        "finish_reason": answer.finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": len(answer.token_ids),
    }


def _scored(scores: list[Score]) -> dict[str, Any]:
    return {
        "logprobs": [score.logprob for score in scores],
        "num_tokens": [len(score.token_ids) for score in scores],
        "is_greedy": [score.is_greedy for score in scores],
    }


def _rated(scores: list[Score]) -> dict[str, Any]:
    return {
        "logprob": math.fsum(score.logprob for score in scores),
        "num_scored_tokens": sum(len(score.token_ids) for score in scores),
        "num_windows": len(scores),
    }


@no_type_check
def windows(ids: Sequence[int], window: int, stride: int | None = None) -> list[tuple[list[int], int]]:
    """(tokens, where scoring starts): every token but the first once, after as many as its window holds before it.

    The first window has up to `window` tokens; each later one begins `stride` (None: half a window) tokens after the
    one before and scores what that one did not reach, as in Hugging Face's guide to the perplexity of fixed-length
    models. ValueError for what cannot be.
    """
    stride = window // 2 if stride is None else stride
    if not 1 <= stride < window:
        raise ValueError(f"stride={stride!r}: stride must be from 1 to window - 1 (window is {window})")
    if len(ids) < 2:
        raise ValueError(f"prompt: {len(ids)} tokens: must be at least 2, since the first one is not scored")
    found, scored = [], 1
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        found.append((list(ids[begin:end]), scored - begin))
        scored = end
        if end == len(ids):
            break
    return found
