"""The engine: requests in, tokens out. This file holds the loop; planning, pages and the device are elsewhere.

One step, with host work overlapped (`async_scheduling`):

    plan n+1 = scheduler.schedule()      counts the token of step n as existing
    dispatch n+1                         the device works on while the host goes on
    process n                            wait for its tokens, stop conditions, text, hashes, pages
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple, no_type_check

import numpy as np

from jaxserve import beams, startup, weights_update
from jaxserve.beam_search import BeamSearchParams
from jaxserve.config import EngineConfig
from jaxserve.counters import Counters
from jaxserve.input_processor import Prompt
from jaxserve.metrics import EngineMetrics, Figures
from jaxserve.models.decoder import Decoder
from jaxserve.models.draft_head import DraftHead
from jaxserve.output_processor import OutputProcessor, WantedRows, wanted_rows
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.pooling_params import PoolingParams
from jaxserve.progress import CompileProgress, print_compiled
from jaxserve.request import GRAMMAR_GAVE_UP, Request, RequestGroup, RequestState
from jaxserve.runner.inputs import Runs
from jaxserve.runner.runner import Computed, StepHandle, StepResult
from jaxserve.runner.slots import pack_admission
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.plan import Admission, PlanEntry, StepPlan
from jaxserve.scheduler.scheduler import SchedulerStats
from jaxserve.speculative.acceptance import NO_DRAFT
from jaxserve.speculative.step_timer import StepTimer
from jaxserve.structured.masks import MaskBuilder
from jaxserve.structured.plan_rows import constrained_rows
from jaxserve.text.tokenizer import Tokenizer


class Begun(NamedTuple):
    """A step whose body has been dispatched."""

    plan: StepPlan
    wanted: WantedRows
    computed: Computed
    dispatched_at: float  # perf_counter, after what had to be compiled


class InFlight(NamedTuple):
    """A step that has been dispatched and not been processed."""

    plan: StepPlan
    wanted: WantedRows
    handle: StepHandle
    dispatched_at: float  # perf_counter, after what had to be compiled


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls it.

    Options are those of `EngineConfig`, as one object or as keywords. `decoder`, `text` and `draft_decoder` take the
    place of what `config.model`, `config.tokenizer` and `config.speculative_config.model` name.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        decoder: Decoder | None = None,
        text: Tokenizer | None = None,
        draft_decoder: Decoder | DraftHead | None = None,
        progress: CompileProgress = print_compiled,
        **options,
    ):
        if config is not None and options:
            raise TypeError(f"give either a config or options, not both: {', '.join(options)}")
        self.config = config or EngineConfig.from_dict(options)
        parts = startup.start(self.config, decoder, text, draft_decoder, progress)
        self.tokenizer = parts.tokenizer
        self.model_config = parts.model_config
        self.max_model_len = parts.max_model_len
        self.deterministic = parts.deterministic
        self.memory_plan = parts.memory_plan
        self.scheduler = parts.scheduler
        self.runner = parts.runner
        self.input_processor = parts.input_processor
        self._drafts = parts.length_controller
        self._timer = StepTimer()
        self._outputs = OutputProcessor(self.tokenizer)
        self._mask_builder = MaskBuilder(self.model_config.vocab_size)
        self._groups: dict[str, RequestGroup] = {}
        self._in_flight: InFlight | None = None
        self._planned: StepPlan | None = None
        self._pending: list[RequestOutput] = []  # what the next `step` returns
        self._metrics = EngineMetrics()
        self._counters = Counters()
        self.weights_version = 0

    @classmethod
    @no_type_check  # it checks itself: the tests' type checker would come first with another error
    def from_flax(
        cls,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        config: EngineConfig | None = None,
        copy: bool = True,
        **options,
    ) -> "Engine":
        """An engine over a Flax NNX model; `config.dtype` other than `auto` casts it, `config.mesh` splits it.

        The engine copies the parameters: the caller may go on training the model and donate them. `copy=False`
        shares the arrays that have the right dtype and place already, for callers who never donate or delete them.
        """
        if not isinstance(model, Decoder):
            raise ValueError(f"model: {type(model).__name__}: must be a jaxserve.models.decoder.Decoder")
        if config is not None and options:
            raise TypeError(f"give either a config or options, not both: {', '.join(options)}")
        config = config or EngineConfig.from_dict(options)
        dtype = model.embed[...].dtype if config.dtype == "auto" else config.dtype
        own = weights_update.own_decoder(model, dtype=dtype, mesh=config.mesh, copy=copy)
        return cls(config, decoder=own, text=tokenizer)

    # ---- requests ---------------------------------------------------------------------------------------

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: the model's `generation_config.json`, if the option says so."""
        return self.input_processor.defaults

    @no_type_check  # it checks itself: the tests' type checker would come first with another error
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | BeamSearchParams | None = None,
        *,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request. `prompt` is text, token ids, or a dict with "prompt" or "prompt_token_ids" (or both: the
        text is then what the ids stand for), and maybe "cache_salt". `arrival_time`, by `time.monotonic`, is when
        its time began; None is now. `PoolingParams` ask for the prompt's embedding;
        `BeamSearchParams` for the likeliest continuations, which come when all are there, the best first.

        Raises ValueError, naming field, value and rule, for anything that the engine could not honour.
        """
        self._check_open()
        if not isinstance(request_id, str) or request_id in self._groups:
            raise ValueError(f"request_id={request_id!r}: request_id must be a string that no running request has")
        group = self.input_processor.build(request_id, prompt, params, arrival_time)
        for request in group.branches:
            if group.search is None:
                self._outputs.add(request)
            self.scheduler.add(request)
        self._groups[request_id] = group
        self._counters.prompt_tokens += len(group.prompt_token_ids)

    def abort(self, request_id: str) -> None:
        """End a request; its pages are free at once. An unknown or finished id is ignored."""
        group = self._groups.get(request_id)
        if group is not None:
            self._end(group, "abort", None)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do or to report."""
        return bool(self._groups or self._pending)

    # ---- the loop ---------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns what it added to each request (new tokens and text only)."""
        self._check_open()
        self._timer.enter()
        plan, self._planned = self._planned or self.scheduler.schedule(), None
        arrived, self._in_flight = self._in_flight, None
        if plan and arrived is not None and not self._is_compiled(plan):
            self._planned = plan  # nobody's token waits for a compilation: the next call dispatches it
        elif plan:
            dispatched, arrived = self._dispatch(plan, arrived)
            if self.config.async_scheduling:
                self._in_flight = dispatched
            else:
                arrived = dispatched
        if arrived is not None:
            self._take_in(arrived)
        outputs, self._pending = self._pending, []
        self._timer.leave()
        return outputs

    def _is_compiled(self, plan: StepPlan) -> bool:
        return self.runner.is_compiled(plan.num_tokens, plan.num_sampled, plan.num_drafting, **plan.head_kind)

    def _dispatch(self, plan: StepPlan, arrived: InFlight | None = None) -> tuple[InFlight, InFlight | None]:
        """Dispatch a step. One with masks takes in the one before it (`arrived`) while its body runs: only the head
        waits for what those tokens allow. Returns the dispatched step, and the other one if that is still to come."""
        begun = self._begin(plan)
        if plan.constrained and arrived is not None:
            self._take_in(arrived)
            arrived = None
        return self._sample(begun), arrived

    def _begin(self, plan: StepPlan) -> Begun:
        for admission in plan.admissions:
            self._admit(admission)
        if plan.copies:
            self.runner.copy_pages(plan.copies)
        _, slots, _, counts, samples, drafts, latest = zip(*plan.entries, strict=True)
        self._counters.count_step(plan, self.scheduler, self.runner.buckets)
        self._metrics.step(plan.num_tokens)
        runs = Runs.of_columns(slots, latest, counts, samples, drafts)
        computed = self.runner.compute(runs, plan.new_pages, **plan.head_kind)
        return Begun(plan, wanted_rows(plan), computed, perf_counter())

    def _sample(self, begun: Begun) -> InFlight:
        plan, wanted, computed, dispatched_at = begun
        masks = self._masks(plan, computed) if plan.constrained else None
        asked = {"scores": wanted.scores, "whole": wanted.whole, "keep_hidden": bool(wanted.pooled)}
        handle = self.runner.sample(computed, masks, **asked)
        return InFlight(plan, wanted, handle, dispatched_at)

    def _masks(self, plan: StepPlan, computed: Computed) -> np.ndarray:
        """What each row may yield. A request whose grammar gives up ends with an error of its own."""
        rows = constrained_rows(plan, computed.draft_tokens())
        masks = self._mask_builder.build([row for _, row in rows], computed.head.bucket)
        for request, row in rows:
            error = row.constraint.error
            group = self._groups.get(request.request_id)
            if error is not None and group is not None and request in group.branches:
                told = f"{GRAMMAR_GAVE_UP} after {len(request.output_token_ids)} tokens: {error}"
                self._end(group, "error", told)
        return masks

    def _admit(self, a: Admission) -> None:
        request = a.request
        packed = pack_admission(
            a.slot,
            a.token_ids,
            a.pages,
            a.num_computed,
            a.write_start,
            request.params,
            request.seed,
            request.num_prompt_tokens,
            request.tables,
            self.runner.max_len,
            self.runner.max_pages,
        )
        self.runner.admit(packed)
        if request.tables is not None:
            self.runner.set_tables(a.slot, request.tables)

    def _take_in(self, arrived: InFlight) -> None:
        """Wait for a step and process what it yielded."""
        plan, result = arrived.plan, arrived.handle.result()
        seconds = self._timer.arrived(arrived.dispatched_at)
        every_row_decodes = plan.num_sampled == plan.num_tokens
        if self._drafts is not None and seconds is not None and every_row_decodes:
            reported, running = result.tokens[: plan.num_sampled], len(plan.entries)
            rows = int((reported != NO_DRAFT).sum()) if self.runner.step.compacts else plan.num_tokens
            self._drafts.observe_step(running, plan.num_tokens - running, rows, seconds)
        self._process(plan, arrived.wanted, result)

    def _process(self, plan: StepPlan, wanted: WantedRows, result: StepResult) -> None:
        """Hand each entry's result to its request and note what is new."""
        new: dict[str, list[CompletionOutput]] = {}
        took: list[Request] = []
        row = sampled_row = generated = 0
        all_finite, tokens = bool(result.finite[: plan.num_tokens].all()), result.tokens.tolist()
        complete, completion, version = self.scheduler.complete, self._outputs.completion, self.weights_version
        of_prompts, whole_rows = bool(wanted.prompts or wanted.pooled), wanted.sampled_whole
        for entry in plan.entries:
            request, _, _, count, sample, drafts, _ = entry
            sampled = tokens[sampled_row : sampled_row + sample + drafts]
            if drafts:
                del sampled[self._drafts.observe(request, sampled) :]
            finite = all_finite or bool(result.finite[row : row + count + max(len(sampled) - 1, 0)].all())
            if of_prompts and finite and request.state is not RequestState.FINISHED:
                self._outputs.take_prompt(request, wanted, result)
            ended = request.finish_reason
            taken = complete(entry, sampled, finite)
            if taken:
                took.append(request)
                del sampled[taken:]
                whole = whole_rows.get(request, -1) if whole_rows else -1
                output = completion(request, sampled, result, sampled_row, whole, version)
                generated += len(sampled)  # without what stands behind a stop string
                if output.finish_reason is not None and request.state is not RequestState.FINISHED:
                    self.scheduler.finish(request)  # a stop string: known only now
                new.setdefault(request.request_id, []).append(output)
            elif request.finish_reason == "error":
                self._fail(entry, new)
            elif request.finish_reason != ended:  # nothing was to be sampled
                output = CompletionOutput(request.index, finish_reason=request.finish_reason)
                new.setdefault(request.request_id, []).append(output)
            row += count + drafts
            sampled_row += sample + drafts
        self._counters.generation_tokens += generated
        self._metrics.took_tokens(took)
        for request_id, deltas in new.items():
            if (group := self._groups.get(request_id)) is not None:
                output = self._report(group, deltas) if group.search is None else self._advance_beams(group)
                if output is not None:
                    self._pending.append(output)

    def _fail(self, entry: PlanEntry, new: dict[str, list[CompletionOutput]]) -> None:
        """End all branches of a request of which one failed."""
        request = entry.request
        group = self._groups.get(request.request_id)
        if group is not None and request in group.branches:  # not a later request of the same id
            # Branches share the prompt's pages: what went wrong in one is wrong in all that still run.
            ended = [delta for delta in new.pop(request.request_id, ()) if delta.finish_reason is not None]
            self._end(group, "error", request.error, ended)

    def _advance_beams(self, group: RequestGroup) -> RequestOutput | None:
        """Go on with a search when all its beams have been heard of. Returns its result when it is done; it is then
        forgotten."""
        if not beams.go_on(group, self.scheduler):
            return None
        del self._groups[group.request_id]
        output = beams.result_of(group, self.tokenizer)
        self._counters.finished.update(found.finish_reason for found in output.outputs)
        return output

    def _report(self, group: RequestGroup, deltas: list[CompletionOutput]) -> RequestOutput:
        """Wrap what is new; forget the request if that was the last of it."""
        finished, first = False, group.branches[0]
        for delta in deltas:
            if delta.finish_reason is not None:
                self._outputs.forget(group.branches[delta.index])
                self._counters.finished[delta.finish_reason] += 1
                if delta.finish_reason in ("stop", "length"):
                    self._metrics.finished(group.branches[delta.index])
                finished = group.finished
        if finished:
            del self._groups[group.request_id]
        output = RequestOutput(
            group.request_id, group.prompt, group.prompt_token_ids, deltas, finished, first.num_cached_tokens
        )
        if first.prompt_logprobs is not None and first.next_to_score is None:
            output.prompt_logprobs, first.prompt_logprobs = first.prompt_logprobs, None  # reported once
        if first.pooled is not None and first.pooled.next_position is None:
            output.embedding = first.pooled.embedding()
        if finished:
            output.metrics = group.metrics()
        return output

    def _end(self, group: RequestGroup, reason: str, error: str | None, ended: Sequence[CompletionOutput] = ()) -> None:
        """End every branch that still runs; reported by the next `step`, with `ended` (not reported so far)."""
        deltas = list(ended)
        for branch in group.branches:
            self.scheduler.held.release(branch)
            if branch.state is not RequestState.FINISHED:
                self.scheduler.finish(branch)
            elif not (reason == "error" and branch.error is not None):
                continue
            branch.finish_reason, branch.error = reason, error
            text = self._outputs.flush(branch)
            deltas.append(CompletionOutput(branch.index, text=text, finish_reason=reason, error=error))
        self._pending.append(self._report(group, deltas))

    # ---- weights ----------------------------------------------------------------------------------------

    @no_type_check
    def update_params(
        self, params: Any, *, running: str = "recompute", version: int | None = None, copy: bool = True
    ) -> None:
        """Replace the weights between two steps. Nothing is recompiled; the prefix cache is dropped.

        params: a `Decoder`, its `nnx.State`, or a tree of the same structure; another float dtype is cast to the
            engine's. ValueError, naming the first parameter that does not fit, leaves everything as it was.
        running: what becomes of running requests. `recompute` computes their keys and values again, under the new
            weights, as after a preemption; the tokens so far stay. `keep` goes on over the old keys and values (a
            request without a token so far starts over, one that is preempted later is recomputed). Tokens carry
            the version that they were sampled with: `CompletionOutput.weights_versions`.
        version: the number of these weights; None counts on.
        copy: as in `from_flax`. When this returns, the engine reads the caller's arrays no more.
        """
        self._check_open()
        weights_update.check_options(running, version)
        params = weights_update.named_parameters(params, self.model_config)
        self._finish_steps()
        self.scheduler.weights_changed(recompute=running == "recompute")
        self.runner.replace_weights(lambda old: weights_update.replaced(old, self.model_config, params, copy=copy))
        self.weights_version = self.weights_version + 1 if version is None else version

    def _finish_steps(self) -> None:
        """Run what is planned and take in what is in flight; the next `step` reports it."""
        while self._in_flight is not None or self._planned is not None:
            arrived, self._in_flight = self._in_flight, None
            if arrived is None:
                plan, self._planned = self._planned, None
                arrived, _ = self._dispatch(plan)
            self._take_in(arrived)

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
            **(self._drafts.stats() if self._drafts is not None else {}),
            "compilations": compiler.num_compiled + compiler.num_loaded,
            "compilations_from_cache": compiler.num_loaded,
            "compilations_after_warmup": compiler.num_after_warmup,
            "deterministic": str(self.deterministic).lower(),
            "max_model_len": self.max_model_len,
            "num_pages": scheduler.pool.num_pages,
            "weights_version": self.weights_version,
        }

    def figures(self) -> Figures:
        """`stats` and the distributions of times and lengths; see `metrics.exposition`."""
        return self._metrics.figures(self.stats())

    def reset_stats(self) -> None:
        """Count from zero again, for measurements; compilations are still counted from the start."""
        self._metrics = EngineMetrics()
        self._counters = Counters()
        self.scheduler.stats = SchedulerStats()
        if self._drafts is not None:
            self._drafts.reset_counts()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless free + cached + owned pages are all pages and no slot is lost."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Give back the device's memory. The engine cannot be used afterwards; closing twice is fine."""
        self._groups.clear()
        self._pending.clear()
        self._outputs.clear()
        self._planned = self._in_flight = None
        self.runner.close()

    def _check_open(self) -> None:
        if self.runner.weights is None:
            raise RuntimeError("this engine is closed")

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()
