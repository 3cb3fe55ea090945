"""From options to the parts of an engine: model, memory plan, scheduler, runner; each check before its cost."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.cache.block_pool import BlockPool
from jaxserve.cache.kv_cache import KVLayout
from jaxserve.cache.memory import CPU_TOKENS_PER_REQUEST, MemoryPlan, device_memory, plan_memory
from jaxserve.checkpoint.demo_model import demo_head_folder
from jaxserve.checkpoint.draft_head import load_head, read_head
from jaxserve.checkpoint.hugging_face import dtype_of, read_config, read_generation_defaults
from jaxserve.checkpoint.loading import load_decoder, model_folder
from jaxserve.checkpoint.sentence_transformers import StoredPooling, read_pooling
from jaxserve.config import EngineConfig, PoolerConfig
from jaxserve.input_processor import InputProcessor
from jaxserve.kernels_pallas.matmul import LinearKernel, choose_linear, why_no_mosaic
from jaxserve.kernels_pallas.paged_attention import XLA, AttentionBackend, choose_attention
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.draft_head import DraftHead, HeadConfig, num_parameters
from jaxserve.models.eagle import EagleConfig
from jaxserve.models.medusa import MedusaConfig
from jaxserve.models.sharding import check_mesh
from jaxserve.models.weights import decoder_leaves
from jaxserve.pooling import Pooler
from jaxserve.progress import CompileProgress
from jaxserve.runner import determinism
from jaxserve.runner.runner import Runner
from jaxserve.runner.slots import KEPT_STATES
from jaxserve.sampling.processing import bytes_per_slot
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.buckets import ROW_MULTIPLE, Buckets
from jaxserve.scheduler.policies import make_policy
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.speculative.length_control import LengthController
from jaxserve.speculative.ngram import NgramProposer
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
    length_controller: LengthController | None


class Model(NamedTuple):
    """A model that is described but not loaded yet; `load` puts it on the device.

    head: of a draft head; `config` is then that of its layer, None where it has none
    """

    config: ModelConfig | None
    dtype: jnp.dtype
    tokenizer: Tokenizer | None
    load: Callable[[], Decoder | DraftHead]
    defaults: SamplingParams = SamplingParams()
    head: HeadConfig | None = None
    pooling: StoredPooling | None = None  # what the checkpoint says of embeddings
    is_demo: bool = False


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
    draft: Model | None


def prepare(
    config: EngineConfig,
    decoder: Decoder | None,
    tokenizer: Tokenizer | None,
    draft_decoder: Decoder | DraftHead | None = None,
) -> Prepared:
    """Everything that is decided before the weights are loaded. ValueError for options that do not go together."""
    model = _given(config, decoder, tokenizer) if decoder is not None else _named(config, tokenizer)
    if config.mesh is not None:
        check_mesh(model.config, config.mesh)
    wanted_len = _wanted_length(config, model.config)
    draft = _draft_model(config, model, draft_decoder)
    attention = _choose_attention(config, model, draft, wanted_len)
    layout = _layout(model, config.page_size or attention.page_size)
    if draft is not None and draft.config is not None:
        layout = replace(layout, draft=_layout(draft, layout.page_size))
    plan = _plan_memory(config, model, draft, layout, wanted_len)
    max_len = _fit_length(config, wanted_len, plan)
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_len:
        raise ValueError(
            f"max_num_batched_tokens={config.max_num_batched_tokens}: without enable_chunked_prefill it must be at "
            f"least max_model_len={max_len}, so that every prompt fits one step"
        )
    if draft is not None:
        _check_draft(draft, model, max_len, config.speculative_config.num_speculative_tokens)
    products = {**model.config.products, **_draft_products(draft)}
    linear = choose_linear(
        config.linear_backend, model.dtype, config.mesh, products=products, deterministic=config.deterministic is True
    )
    by_kernels = config.deterministic is True and jax.default_backend() == "gpu"
    if by_kernels and (missing := determinism.kernels_missing(attention, linear)):
        why = why_no_mosaic(model.dtype, config.mesh, products=products)
        raise ValueError(f"deterministic=True: {missing}" + (f": {why}" if why else ""))
    decided = _buckets(config, jax.default_backend(), model.dtype, linear_kernel=linear is not None, proven=by_kernels)
    return Prepared(model, layout, plan, max_len, attention, linear, *decided, draft)


def start(
    config: EngineConfig,
    decoder: Decoder | None,
    tokenizer: Tokenizer | None,
    draft_decoder: Decoder | DraftHead | None,
    progress: CompileProgress,
) -> Parts:
    """Build everything that an engine needs; `progress` hears of warm-up. ValueError for options that do not fit."""
    prepared = prepare(config, decoder, tokenizer, draft_decoder)
    model, layout, plan, max_len, attention, linear, deterministic, _, buckets, draft = prepared
    _log.info("%s", plan)
    speculative = config.speculative_config
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
        proposer=NgramProposer.of(speculative),
        draft=draft.load() if draft is not None else None,
        least_chance=speculative.draft_confidence_threshold if speculative is not None else 0.0,
        acceptance=speculative.acceptance if speculative is not None else "agreement",
        max_drafts=speculative.num_speculative_tokens if speculative is not None else 0,
        constrains=model.tokenizer is not None,
    )
    if deterministic:
        ends = [(sizes[0], sizes[-1]) for sizes in (buckets.tokens, buckets.rows)]
        differs = determinism.row_invariance(runner.step, runner.weights, *ends, runner.compiler)
        if differs is not None and config.deterministic is True:
            raise ValueError(f"deterministic=True: {differs}")
        deterministic = differs is None
    controller = None if speculative is None else LengthController(speculative, buckets.tokens)
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
        draft_lengths=controller,
        recomputes_last=draft is not None and isinstance(draft.head, EagleConfig),
    )
    if config.compile == "warmup":
        runner.warm_up(progress)
    inputs = InputProcessor(
        model.config,
        model.tokenizer,
        max_len,
        seed=config.seed,
        defaults=model.defaults,
        scheduling_policy=config.scheduling_policy,
        pooler=_pooler(config, model),
    )
    return Parts(model.tokenizer, model.config, max_len, deterministic, plan, scheduler, runner, inputs, controller)


def _layout(model: Model, page_size: int) -> KVLayout:
    return KVLayout(model.config.num_layers, model.config.num_kv_heads, model.config.head_dim, page_size, model.dtype)


def _choose_attention(config: EngineConfig, model: Model, draft: Model | None, max_model_len: int) -> AttentionBackend:
    """One backend for both models: it must suit the draft model's heads, too."""
    chosen = [
        choose_attention(
            config.attention_backend,
            head_dim=one.config.head_dim,
            group=one.config.num_heads // one.config.num_kv_heads,
            dtype=one.dtype,
            max_model_len=max_model_len,
            mesh=config.mesh,
        )
        for one in (model, draft)
        if one is not None and one.config is not None
    ]
    return chosen[0] if len({(backend.name, backend.work) for backend in chosen}) == 1 else XLA


def _draft_model(config: EngineConfig, model: Model, decoder: Decoder | DraftHead | None) -> Model | None:
    """The model or head that proposes tokens, in the dtype of the model, whose pages it shares."""
    speculative = config.speculative_config
    if speculative is None or speculative.method == "ngram":
        if decoder is not None:
            raise ValueError("draft_decoder: it is used where speculative_config.method names a model or a head only")
        return None
    method = speculative.method
    if config.mesh is not None:
        raise ValueError(f"speculative_config.method={method!r}: it must be another on a mesh: it runs on one device")
    if decoder is not None:
        return _given_draft(decoder, method, model)
    if speculative.model is not None:
        folder = model_folder(speculative.model)
    elif method == "eagle" and model.is_demo:
        folder = demo_head_folder()
    else:
        raise ValueError(f"speculative_config.model=None: it must name a model or a head with method={method!r}")
    if method != "draft_model":
        head = read_head(folder, method, model.config)
        if isinstance(head, MedusaConfig):  # what is not used is not loaded
            head = replace(head, num_heads=min(head.num_heads, speculative.num_speculative_tokens))
        return Model(head.layer, model.dtype, None, lambda: load_head(folder, head, model.dtype), head=head)
    described = read_config(folder, max_model_len=config.max_model_len)
    tokenizer = Tokenizer.from_folder(folder, vocab_size=described.vocab_size) if model.tokenizer is not None else None
    load = lambda: load_decoder(folder, dtype=model.dtype, max_model_len=config.max_model_len)
    return Model(described, model.dtype, tokenizer, load)


def _given_draft(decoder: Decoder | DraftHead, method: str, model: Model) -> Model:
    is_head = isinstance(decoder, DraftHead)
    own = decoder.config.method if is_head else "draft_model"
    if own != method:
        raise ValueError(f"draft_decoder: it is one for the method {own!r} and must be one for {method!r}")
    dtype = jax.tree.leaves(nnx.state(decoder, nnx.Param))[0].dtype
    if dtype != model.dtype:
        raise ValueError(f"draft_decoder: its dtype {dtype} must be the model's {model.dtype}")
    config = decoder.config.layer if is_head else decoder.config
    return Model(config, model.dtype, None, lambda: decoder, head=decoder.config if is_head else None)


def _pooler(config: EngineConfig, model: Model) -> Pooler | None:
    """How the engine makes embeddings; None if it generates."""
    if config.runner == "generate" or (config.runner == "auto" and model.pooling is None):
        return None
    stored, asked = model.pooling or StoredPooling("LAST", True), config.pooler_config or PoolerConfig()
    kind = stored.pooling_type if asked.pooling_type is None else asked.pooling_type
    normalize = stored.normalize if asked.normalize is None else asked.normalize
    return Pooler(kind, normalize, model.config.hidden_size)


def _draft_products(draft: Model | None) -> dict[str, tuple[int, int]]:
    if draft is None:
        return {}
    return {f"the draft's {name}": size for name, size in (draft.head or draft.config).products.items()}


def _check_draft(draft: Model, model: Model, max_len: int, most: int) -> None:
    """ValueError unless a draft model's tokens are the model's, its context is long enough, and `most` drafts can be
    had from it."""
    if isinstance(draft.head, MedusaConfig) and draft.head.num_heads < most:
        rule = f"at most {draft.head.num_heads}, the number of heads of speculative_config.model"
        raise ValueError(f"speculative_config.num_speculative_tokens={most}: it must be {rule}")
    if draft.head is not None and draft.head.target_hidden != model.config.hidden_size:
        width = draft.head.target_hidden
        raise ValueError(f"draft_decoder: it is a head for hidden_size={width}, not {model.config.hidden_size}")
    own, other = model.config.vocab_size, (draft.head or draft.config).vocab_size
    if own != other:
        raise ValueError(f"speculative_config.model: its vocab_size={other} must be the model's {own}")
    if draft.tokenizer is not None and draft.tokenizer.backend.get_vocab() != model.tokenizer.backend.get_vocab():
        raise ValueError("speculative_config.model: its tokenizer must be the model's, and has other tokens")
    if draft.head is not None:  # beyond its context it is only right less often
        return
    if (longest := draft.config.max_position_embeddings) < max_len:
        raise ValueError(
            f"max_model_len={max_len}: it must be at most max_position_embeddings={longest} of speculative_config.model"
        )


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
    pooling = read_pooling(folder) if config.runner != "generate" else None
    defaults = _defaults(config, folder)
    return Model(model_config, dtype, tokenizer, load, defaults, pooling=pooling, is_demo=config.model is None)


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


def _num_parameters(config: ModelConfig) -> int:
    head = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0  # it is stored transposed, too
    return head + sum(math.prod(leaf.shape) for leaf in decoder_leaves(config))


def _plan_memory(config: EngineConfig, model: Model, draft: Model | None, layout: KVLayout, longest: int) -> MemoryPlan:
    itemsize = jnp.dtype(model.dtype).itemsize
    parameters = _num_parameters(model.config)
    if draft is not None:
        parameters += _num_parameters(draft.config) if draft.head is None else num_parameters(draft.head)
    rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
    sampled = rows if config.speculative_config is None else max(rows, tokens)
    widest = 4 * (model.config.hidden_size + 2 * model.config.intermediate_size)
    workspace = 4 * sampled * model.config.vocab_size * 3 + 4 * tokens * widest
    workspace += rows * (bytes_per_slot(model.config.vocab_size) + _draft_logits_bytes(config, model))
    if draft is not None and draft.head is not None:
        workspace += rows * KEPT_STATES * draft.head.state_size * itemsize
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


def _draft_logits_bytes(config: EngineConfig, model: Model) -> int:
    """Of a slot, which remembers what its drafts were sampled from (`StepDefinition.keeps_draft_logits`)."""
    speculative = config.speculative_config
    if speculative is None or speculative.acceptance != "rejection" or speculative.method == "ngram":
        return 0
    return 4 * speculative.num_speculative_tokens * model.config.vocab_size


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
    config: EngineConfig, backend: str, dtype: jnp.dtype, *, linear_kernel: bool, proven: bool
) -> tuple[bool, str | None, Buckets]:
    """Whether to be deterministic, why not if that was wanted, and the shapes that go with it.

    proven: by construction, whatever the list of what was measured says
    """
    limits, speculates = (config.max_num_batched_tokens, config.max_num_seqs), config.speculative_config is not None
    make = lambda smallest: Buckets.make(*limits, smallest, speculates=speculates)
    if config.deterministic is False:
        return False, None, make(ROW_MULTIPLE)
    buckets = make(determinism.smallest_bucket(backend, dtype, linear_kernel=linear_kernel))
    reason = None if proven else determinism.unproven(backend, dtype, buckets.tokens[-1])
    if reason is None:
        return True, None, buckets
    if config.deterministic is True:
        raise ValueError(f"deterministic=True: {reason}")
    return False, reason, make(ROW_MULTIPLE)
