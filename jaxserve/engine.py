"""The engine: requests in, tokens out. This file holds the loop; planning, pages and the device are elsewhere.

One step, with host work overlapped (`async_scheduling`):

    plan n+1 = scheduler.schedule()      counts the token of step n as existing
    dispatch n+1                         the device works on while the host goes on
    process n                            wait for its tokens, stop conditions, text, hashes, pages
"""

from collections.abc import Sequence
from typing import NamedTuple, no_type_check

import numpy as np

from jaxserve import startup
from jaxserve.config import EngineConfig
from jaxserve.models.decoder import Decoder
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.request import Request, RequestGroup, RequestState
from jaxserve.runner.inputs import Run
from jaxserve.runner.runner import StepHandle, StepResult
from jaxserve.runner.slots import pack_admission
from jaxserve.sampling_params import SamplingParams, child_seed
from jaxserve.scheduler.scheduler import PlanEntry, SchedulerStats, StepPlan
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.validation import is_integer

Prompt = str | Sequence[int] | np.ndarray | dict


class InFlight(NamedTuple):
    """A step that has been dispatched and not been processed."""

    plan: StepPlan
    handle: StepHandle


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls it.

    Options are those of `EngineConfig`, as one object or as keywords. `model` and `tokenizer` take the place of
    what `config.model` names.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        decoder: Decoder | None = None,
        text: Tokenizer | None = None,
        **options,
    ):
        if config is not None and options:
            raise TypeError(f"give either a config or options, not both: {', '.join(options)}")
        self.config = config or EngineConfig.from_dict(options)
        parts = startup.start(self.config, decoder, text)
        self.tokenizer = parts.tokenizer
        self.model_config = parts.model_config
        self.max_model_len = parts.max_model_len
        self.deterministic = parts.deterministic
        self.memory_plan = parts.memory_plan
        self.scheduler = parts.scheduler
        self.runner = parts.runner
        self._groups: dict[str, RequestGroup] = {}
        self._detokenizers: dict[Request, IncrementalDetokenizer] = {}
        self._in_flight: InFlight | None = None
        self._arrivals = 0
        self._planned: StepPlan | None = None
        self._pending: list[RequestOutput] = []  # what the next `step` returns
        self._counters = startup.Counters()

    # ---- requests ---------------------------------------------------------------------------------------

    @no_type_check  # it checks itself: the tests' type checker would come first with another error
    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> None:
        """Queue a request. `prompt` is text, token ids, or a dict with "prompt" or "prompt_token_ids" (or both: the
        text is then what the ids stand for).

        Raises ValueError, naming field, value and rule, for anything that the engine could not honour.
        """
        self._check_open()
        params = SamplingParams() if params is None else params
        if not isinstance(request_id, str) or request_id in self._groups:
            raise ValueError(f"request_id={request_id!r}: request_id must be a string that no running request has")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r}: params must be a SamplingParams")
        if not is_integer(priority):
            raise ValueError(f"priority={priority!r}: priority must be an integer")
        if priority and self.config.scheduling_policy != "priority":
            raise ValueError(f"priority={priority}: priority must be 0 unless scheduling_policy is 'priority'")
        text, ids = self._prompt(prompt)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        limit = self.max_model_len if params.max_tokens is None else len(ids) + params.max_tokens
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self.model_config.eos_token_ids)
        self._arrivals += 1
        seed = params.seed if params.seed is not None else child_seed(self.config.seed, self._arrivals)
        group = RequestGroup(request_id, text, ids, params, [])
        for index in range(params.n):
            request = Request(
                request_id=request_id,
                index=index,
                prompt_token_ids=ids,
                params=params,
                seed=child_seed(seed, index),
                arrival=self._arrivals * 2**10 + index,
                max_total_tokens=min(limit, self.max_model_len),
                stop_token_ids=frozenset(stops),
                priority=priority,
                fork_of=group.branches[0] if index else None,
            )
            group.branches.append(request)
            if self.tokenizer is not None:
                self._detokenizers[request] = IncrementalDetokenizer(self.tokenizer)
            self.scheduler.add(request)
        self._groups[request_id] = group
        self._counters.prompt_tokens += len(ids)

    def abort(self, request_id: str) -> None:
        """End a request; its pages are free at once. An unknown or finished id is ignored."""
        group = self._groups.get(request_id)
        if group is not None:
            self._end(group, "abort", None)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do or to report."""
        return bool(self._groups or self._pending)

    @no_type_check
    def _prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, dict):
            if not prompt or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
                raise ValueError(f"prompt: keys {list(prompt)}: must be 'prompt' or 'prompt_token_ids', or both")
            for key, value in prompt.items():
                if isinstance(value, str) != (key == "prompt"):
                    kind = type(value).__name__
                    raise ValueError(f"{key}: {kind}: 'prompt' must be text, 'prompt_token_ids' token ids")
            text = prompt.get("prompt")
            prompt = prompt.get("prompt_token_ids", text)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt: text needs a tokenizer, and this engine has none; give token ids")
            ids = self.tokenizer.encode(prompt)
        elif _is_sequence(prompt):
            ids = [int(i) if isinstance(i, np.integer) else i for i in prompt]
        else:
            raise ValueError(f"prompt: {type(prompt).__name__}: must be text or a sequence of token ids")
        self._check_ids("prompt_token_ids", ids)
        if not ids:
            raise ValueError("prompt: it holds no tokens: it must hold at least one")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"prompt: {len(ids)} tokens: must be fewer than max_model_len={self.max_model_len}, "
                "which counts prompt and output together"
            )
        return text, ids

    @no_type_check
    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        vocab = self.model_config.vocab_size
        wrong = [i for i in ids if not is_integer(i) or not 0 <= i < vocab]
        if wrong:
            raise ValueError(f"{field}: {wrong[:8]}: must be integers from 0 to {vocab - 1}, the model's vocabulary")

    # ---- the loop ---------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns what it added to each request (new tokens and text only)."""
        self._check_open()
        plan, self._planned = self._planned or self.scheduler.schedule(), None
        arrived, self._in_flight = self._in_flight, None
        if plan and arrived is not None and not self.runner.is_compiled(plan.num_tokens, plan.num_sampled):
            self._planned = plan  # nobody's token waits for a compilation: the next call dispatches it
        elif plan:
            dispatched = InFlight(plan, self._dispatch(plan))
            if self.config.async_scheduling:
                self._in_flight = dispatched
            else:
                arrived = dispatched
        if arrived is not None:
            self._process(arrived.plan, arrived.handle.result())
        outputs, self._pending = self._pending, []
        return outputs

    def _dispatch(self, plan: StepPlan) -> StepHandle:
        for a in plan.admissions:
            self.runner.admit(
                pack_admission(
                    a.slot,
                    a.token_ids,
                    a.pages,
                    a.num_computed,
                    a.write_start,
                    a.request.params,
                    a.request.seed,
                    self.runner.max_len,
                    self.runner.max_pages,
                )
            )
        if plan.copies:
            self.runner.copy_pages(plan.copies)
        runs = [Run(entry.slot, entry.start, entry.count, entry.sample) for entry in plan.entries]
        self._counters.count_step(plan, self.scheduler, self.runner.buckets)
        return self.runner.run(runs, plan.new_pages)

    def _process(self, plan: StepPlan, result: StepResult) -> None:
        """Hand each entry's result to its request and note what is new."""
        new: dict[str, list[CompletionOutput]] = {}
        row = sampled_row = 0
        for entry in plan.entries:
            request = entry.request
            finite = bool(result.finite[row : row + entry.count].all())
            row += entry.count
            token = int(result.tokens[sampled_row]) if entry.sample else None
            took = self.scheduler.complete(entry, token, finite)
            if took:
                new.setdefault(request.request_id, []).append(self._output(entry, token, result, sampled_row))
            elif request.finish_reason == "error":
                group = self._groups.get(request.request_id)
                if group is not None and request in group.branches:  # not a later request of the same id
                    # Branches share the prompt's pages: what went wrong in one is wrong in all that still run.
                    ended = [delta for delta in new.pop(request.request_id, ()) if delta.finish_reason is not None]
                    self._end(group, "error", request.error, ended)
            sampled_row += entry.sample
        self._pending += [
            self._report(self._groups[request_id], deltas)
            for request_id, deltas in new.items()
            if request_id in self._groups
        ]

    def _output(self, entry: PlanEntry, token: int, result: StepResult, row: int) -> CompletionOutput:
        request = entry.request
        self._counters.generation_tokens += 1
        output = CompletionOutput(
            request.index,
            token_ids=[token],
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        detokenizer = self._detokenizers.get(request)
        if detokenizer is not None:
            if request.finish_reason != "stop":  # the token that stops is not part of the text
                output.text = detokenizer.push([token])
            if request.finish_reason is not None:
                output.text += detokenizer.flush()
        if request.params.logprobs is not None:
            output.logprobs = [self._logprobs(request.params.logprobs, token, result.logprobs, row)]
            output.cumulative_logprob = output.logprobs[0][token].logprob
        return output

    def _logprobs(self, count: int, token: int, logprobs, row: int) -> dict[int, Logprob]:
        text = (lambda i: self.tokenizer.token_text(i)) if self.tokenizer is not None else (lambda i: "")
        found = {token: Logprob(float(logprobs.token_logprob[row]), int(logprobs.rank[row]), text(token))}
        top = zip(logprobs.top_ids[row, :count].tolist(), logprobs.top_logprobs[row, :count].tolist(), strict=True)
        for rank, (token_id, logprob) in enumerate(top, 1):
            found.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
        return found

    def _report(self, group: RequestGroup, deltas: list[CompletionOutput]) -> RequestOutput:
        """Wrap what is new; forget the request if that was the last of it."""
        for delta in deltas:
            if delta.finish_reason is not None:
                self._detokenizers.pop(group.branches[delta.index], None)
                self._counters.finished[delta.finish_reason] += 1
        finished = group.finished
        if finished:
            del self._groups[group.request_id]
        return RequestOutput(
            group.request_id,
            group.prompt,
            group.prompt_token_ids,
            deltas,
            finished,
            group.branches[0].num_cached_tokens,
        )

    def _end(self, group: RequestGroup, reason: str, error: str | None, ended: Sequence[CompletionOutput] = ()) -> None:
        """End every branch that still runs; reported by the next `step`, with `ended` (not reported so far)."""
        deltas = list(ended)
        for branch in group.branches:
            if branch.state is not RequestState.FINISHED:
                self.scheduler.finish(branch)
            elif not (reason == "error" and branch.error is not None):
                continue
            branch.finish_reason, branch.error = reason, error
            detokenizer = self._detokenizers.get(branch)
            text = detokenizer.flush() if detokenizer is not None else ""
            deltas.append(CompletionOutput(branch.index, text=text, finish_reason=reason, error=error))
        self._pending.append(self._report(group, deltas))

    # ---- state ------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float | str]:
        """Numbers and strings, with vLLM's metric names (without prefix) where vLLM has them."""
        scheduler, compiler = self.scheduler, self.runner.compiler
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting) + len(scheduler.preempted),
            "kv_cache_usage_perc": 1 - scheduler.pool.num_free / scheduler.pool.num_pages,
            "num_preemptions": scheduler.stats.num_preemptions,
            "prefix_cache_queries": scheduler.stats.prefix_cache_queries,
            "prefix_cache_hits": scheduler.stats.prefix_cache_hits,
            **self._counters.stats(),
            "compilations": compiler.num_compiled + compiler.num_loaded,
            "compilations_from_cache": compiler.num_loaded,
            "compilations_after_warmup": compiler.num_after_warmup,
            "deterministic": str(self.deterministic).lower(),
            "max_model_len": self.max_model_len,
            "num_pages": scheduler.pool.num_pages,
        }

    def reset_stats(self) -> None:
        """Count from zero again, for measurements; compilations are still counted from the start."""
        self._counters = startup.Counters()
        self.scheduler.stats = SchedulerStats()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless free + cached + owned pages are all pages and no slot is lost."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Give back the device's memory. The engine cannot be used afterwards; closing twice is fine."""
        self._groups.clear()
        self._pending.clear()
        self._detokenizers.clear()
        self._planned = self._in_flight = None
        self.runner.close()

    def _check_open(self) -> None:
        if self.runner.weights is None:
            raise RuntimeError("this engine is closed")

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _is_sequence(prompt: object) -> bool:
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1
    return isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray | memoryview)
