"""From options to the parts of an engine: model, memory plan, scheduler, runner; each check before its cost."""

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.cache.block_pool import BlockPool
from jaxserve.cache.kv_cache import KVLayout
from jaxserve.cache.memory import CPU_TOKENS_PER_REQUEST, MemoryPlan, device_memory, plan_memory
from jaxserve.checkpoint.hugging_face import dtype_of, read_config, read_generation_defaults
from jaxserve.checkpoint.loading import load_decoder, model_folder
from jaxserve.config import EngineConfig
from jaxserve.input_processor import InputProcessor
from jaxserve.kernels_pallas.matmul import LinearKernel, choose_linear
from jaxserve.kernels_pallas.paged_attention import AttentionBackend, choose_attention
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.sharding import check_mesh
from jaxserve.models.weights import decoder_leaves
from jaxserve.runner import determinism
from jaxserve.runner.runner import Runner
from jaxserve.sampling.processing import bytes_per_slot
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.buckets import ROW_MULTIPLE, Buckets
from jaxserve.scheduler.policies import make_policy
from jaxserve.scheduler.scheduler import Scheduler, StepPlan
from jaxserve.text.tokenizer import Tokenizer

_log = logging.getLogger("jaxserve")


class Parts(NamedTuple):
    """What an engine is made of."""

    tokenizer: Tokenizer | None
    model_config: ModelConfig
    max_model_len: int
    deterministic: bool
    memory_plan: MemoryPlan
    scheduler: Scheduler
    runner: Runner
    input_processor: InputProcessor


class Model(NamedTuple):
    """A model that is described but not loaded yet; `load` puts it on the device."""

    config: ModelConfig
    dtype: jnp.dtype
    tokenizer: Tokenizer | None
    load: Callable[[], Decoder]
    defaults: SamplingParams = SamplingParams()


class Prepared(NamedTuple):
    """What an engine will be, before the weights are loaded.

    `not_proven` says why results will depend on the batch, if `deterministic` is False and was not asked to be.
    """

    model: Model
    layout: KVLayout
    memory_plan: MemoryPlan
    max_model_len: int
    attention: AttentionBackend
    linear_kernel: LinearKernel | None
    deterministic: bool
    not_proven: str | None
    buckets: Buckets


@dataclass
class Counters:
    """What the engine counts itself; see `Engine.stats`."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    computed_tokens: int = 0
    padded_tokens: int = 0
    owned_positions: int = 0
    used_positions: int = 0
    finished: Counter = field(default_factory=Counter)

    def count_step(self, plan: StepPlan, scheduler: Scheduler, buckets: Buckets) -> None:
        tokens = plan.num_tokens
        self.steps += 1
        self.computed_tokens += tokens
        self.padded_tokens += buckets.token_bucket(tokens) - tokens
        for request in scheduler.running:
            self.owned_positions += len(request.pages) * scheduler.page_size
            self.used_positions += request.num_computed

    def stats(self) -> dict[str, int | float]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "steps": self.steps,
            "computed_tokens": self.computed_tokens,
            "padding_waste": self.padded_tokens / max(self.computed_tokens + self.padded_tokens, 1),
            "kv_waste": (self.owned_positions - self.used_positions) / max(self.owned_positions, 1),
            **{f"request_success_{reason}": count for reason, count in sorted(self.finished.items())},
        }


def prepare(config: EngineConfig, decoder: Decoder | None, tokenizer: Tokenizer | None) -> Prepared:
    """Everything that is decided before the weights are loaded. ValueError for options that do not go together."""
    model = _given(config, decoder, tokenizer) if decoder is not None else _named(config, tokenizer)
    if config.mesh is not None:
        check_mesh(model.config, config.mesh)
    wanted_len = _wanted_length(config, model.config)
    size = model.config
    attention = choose_attention(
        config.attention_backend,
        head_dim=size.head_dim,
        group=size.num_heads // size.num_kv_heads,
        dtype=model.dtype,
        max_model_len=wanted_len,
        mesh=config.mesh,
    )
    page_size = config.page_size or attention.page_size
    layout = KVLayout(size.num_layers, size.num_kv_heads, size.head_dim, page_size, model.dtype)
    plan = _plan_memory(config, model, layout, wanted_len)
    max_len = _fit_length(config, wanted_len, plan)
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_len:
        raise ValueError(
            f"max_num_batched_tokens={config.max_num_batched_tokens}: without enable_chunked_prefill it must be at "
            f"least max_model_len={max_len}, so that every prompt fits one step"
        )
    linear = choose_linear(
        config.linear_backend,
        model.dtype,
        config.mesh,
        products=model.config.products,
        deterministic=config.deterministic is True,
    )
    decided = _buckets(config, jax.default_backend(), model.dtype, linear_kernel=linear is not None)
    return Prepared(model, layout, plan, max_len, attention, linear, *decided)


def start(config: EngineConfig, decoder: Decoder | None, tokenizer: Tokenizer | None) -> Parts:
    """Build everything that an engine needs. ValueError for options that do not go together."""
    model, layout, plan, max_len, attention, linear, deterministic, _, buckets = prepare(config, decoder, tokenizer)
    _log.info("%s", plan)
    runner = Runner(
        model.load(),
        layout=layout,
        num_pages=plan.num_pages,
        num_slots=config.max_num_seqs,
        max_len=max_len,
        buckets=buckets,
        attention=attention,
        linear_kernel=linear,
        mesh=config.mesh,
        cache_dir=config.compilation_cache(),
    )
    if deterministic:
        ends = [(sizes[0], sizes[-1]) for sizes in (buckets.tokens, buckets.rows)]
        differs = determinism.row_invariance(runner.step, runner.weights, *ends, runner.compiler)
        if differs is not None and config.deterministic is True:
            raise ValueError(f"deterministic=True: {differs}")
        deterministic = differs is None
    scheduler = Scheduler(
        BlockPool(plan.num_pages, enable_prefix_caching=config.enable_prefix_caching),
        page_size=layout.page_size,
        buckets=buckets,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy=make_policy(
            config.scheduling_policy, max_num_seqs=config.max_num_seqs, priority_aging_s=config.priority_aging_s
        ),
    )
    if config.compile == "warmup":
        runner.warm_up(_progress)
    inputs = InputProcessor(
        model.config,
        model.tokenizer,
        max_len,
        seed=config.seed,
        defaults=model.defaults,
        scheduling_policy=config.scheduling_policy,
    )
    return Parts(model.tokenizer, model.config, max_len, deterministic, plan, scheduler, runner, inputs)


def _wanted_length(config: EngineConfig, model: ModelConfig) -> int:
    """max_model_len, or the model's own. Stretched positions reach further: linear by its factor, dynamic freely."""
    longest, scaling = model.max_position_embeddings, model.rope_scaling
    if config.max_model_len is None or scaling.kind == "dynamic":
        return config.max_model_len or longest
    if scaling.kind == "linear":
        longest = int(longest * scaling.factor)
    if config.max_model_len > longest:
        raise ValueError(
            f"max_model_len={config.max_model_len}: max_model_len must be at most {longest}, what the model's "
            f"max_position_embeddings={model.max_position_embeddings} and its rope scaling allow"
        )
    return config.max_model_len


def _named(config: EngineConfig, tokenizer: Tokenizer | None) -> Model:
    folder = model_folder(config.model)
    model_config = read_config(folder, max_model_len=config.max_model_len)
    if tokenizer is None:
        text_folder = folder if config.tokenizer is None else model_folder(config.tokenizer)
        tokenizer = Tokenizer.from_folder(text_folder, vocab_size=model_config.vocab_size)
    dtype = dtype_of(model_config, config.dtype)
    load = lambda: load_decoder(folder, dtype=dtype, max_model_len=config.max_model_len, mesh=config.mesh)
    return Model(model_config, dtype, tokenizer, load, _defaults(config, folder))


def _defaults(config: EngineConfig, folder: Path) -> SamplingParams:
    """The parameters of requests that bring none."""
    values = read_generation_defaults(folder) if config.generation_config == "auto" else {}
    try:
        return SamplingParams.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{folder / 'generation_config.json'}: {error}; generation_config='none' ignores it") from None


def _given(config: EngineConfig, decoder: Decoder, tokenizer: Tokenizer | None) -> Model:
    if tokenizer is None and config.tokenizer is not None:
        tokenizer = Tokenizer.from_folder(model_folder(config.tokenizer), vocab_size=decoder.config.vocab_size)
    return Model(decoder.config, decoder.embed[...].dtype, tokenizer, lambda: decoder)


def _plan_memory(config: EngineConfig, model: Model, layout: KVLayout, longest: int) -> MemoryPlan:
    itemsize = jnp.dtype(model.dtype).itemsize
    parameters = sum(math.prod(leaf.shape) for leaf in decoder_leaves(model.config))
    if model.config.tie_word_embeddings:
        parameters += model.config.vocab_size * model.config.hidden_size  # the head is stored transposed
    rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
    widest = 4 * (model.config.hidden_size + 2 * model.config.intermediate_size)
    workspace = 4 * rows * model.config.vocab_size * 3 + 4 * tokens * widest
    workspace += rows * bytes_per_slot(model.config.vocab_size)
    device = jax.local_devices()[0]
    return plan_memory(
        layout,
        weights=parameters * itemsize,
        workspace=workspace,
        total=device_memory(device),
        is_cpu=device.platform == "cpu",
        memory_utilization=config.memory_utilization,
        num_pages=config.num_pages,
        wanted_tokens=max(longest, config.max_num_seqs * CPU_TOKENS_PER_REQUEST),
    )


def _fit_length(config: EngineConfig, wanted: int, plan: MemoryPlan) -> int:
    """The longest request: what is wanted, cut to the pool unless it was asked for explicitly."""
    capacity = plan.num_pages * plan.page_size
    if config.max_model_len is not None and wanted > capacity:
        raise ValueError(
            f"max_model_len={wanted}: max_model_len must be at most the pool's {capacity} tokens "
            f"(num_pages={plan.num_pages} of page_size={plan.page_size})"
        )
    return min(wanted, capacity)


def _buckets(
    config: EngineConfig, backend: str, dtype: jnp.dtype, *, linear_kernel: bool
) -> tuple[bool, str | None, Buckets]:
    """Whether to be deterministic, why not if that was wanted, and the shapes that go with it."""
    make = lambda smallest: Buckets.make(config.max_num_batched_tokens, config.max_num_seqs, smallest)
    if config.deterministic is False:
        return False, None, make(ROW_MULTIPLE)
    buckets = make(determinism.smallest_bucket(backend, dtype, linear_kernel=linear_kernel))
    reason = determinism.unproven(backend, dtype, buckets.tokens[-1])
    if reason is None:
        return True, None, buckets
    if config.deterministic is True:
        raise ValueError(f"deterministic=True: {reason}")
    return False, reason, make(ROW_MULTIPLE)


def _progress(done: int, total: int, name: str) -> None:
    """One line that rewrites itself on a terminal, a line for each program elsewhere."""
    start, end = ("\r", "\n" if done == total else "") if sys.stderr.isatty() else ("", "\n")
    print(f"{start}jaxserve: compiled {done}/{total} {name:<24}", end=end, file=sys.stderr, flush=True)
