"""The engine's options. A leaf: knows no JAX. Names are vLLM's where vLLM has the option."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, no_type_check

from jaxserve.validation import check_names, is_integer, is_number, nearest_name, require

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "reference", "xla", "native", "mosaic")
LINEAR_BACKENDS = ("auto", "xla", "native", "mosaic")
SCHEDULING_POLICIES = ("fcfs", "priority", "fair", "static")
COMPILE_MODES = ("lazy", "warmup")
GENERATION_CONFIGS = ("auto", "none")
SPECULATIVE_METHODS = ("ngram", "draft_model", "eagle", "eagle3", "medusa")
LENGTH_CONTROLS = ("auto", "fixed")
ACCEPTANCE_RULES = ("agreement", "rejection")
RUNNERS = ("auto", "generate", "pooling")
POOLING_TYPES = ("LAST", "MEAN")
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
DRAFT_CONFIDENCE = 0.1  # below it one more draft of a head costs more than it yields: it takes a twentieth of a step
MAX_DRAFT_TOKENS = 15  # with the token before them a decode tile of 16 rows


def cache_folder() -> Path:
    """Where converted models and compiled programs are kept: `JAXSERVE_CACHE`, or ~/.cache/jaxserve."""
    return Path(os.environ.get("JAXSERVE_CACHE") or "~/.cache/jaxserve").expanduser().absolute()


@no_type_check  # it checks itself: the tests' type checker would come first with another error
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How draft tokens are proposed and how many are verified in a step. The output does not depend on it; with
    `acceptance="rejection"` only its distribution does not.

    Attributes:
        method: `ngram` proposes what followed the last tokens when they last occurred (prompt lookup); `draft_model`
            lets a smaller model of the same vocabulary go ahead; `eagle` and `eagle3` continue the model's hidden
            states by a head of one layer; `medusa` guesses each position from the last of them by a head of its own.
        model: `draft_model`: its name, as `EngineConfig.model`; for the heads their folder or hub id. The demo model
            has an EAGLE head of its own, which is taken where none is named.
        num_speculative_tokens: the most draft tokens of a request in a step.
        length_control: `auto` chooses a length for each request and step by what its drafts were accepted and by what
            a row of the step costs, `fixed` always takes `num_speculative_tokens`.
        draft_lengths: the lengths that `auto` chooses from, besides `num_speculative_tokens`.
        acceptance: which drafts stand. `agreement`: those that the target itself samples at their positions, so that
            a request's tokens are those it gets without speculation. `rejection` (modified rejection sampling): each
            with probability min(1, p / q), p the target's and q the proposer's; at temperatures above 0 the tokens
            have the same distribution as without, but are others.
        prompt_lookup: whether a model or a head proposes only where `ngram` finds nothing. None is yes with
            `agreement`; with `rejection`, which needs the probability of each draft, it cannot be.
        prompt_lookup_min: of prompt lookup: the fewest tokens that must have occurred before. None is 1 with `ngram`
            and 2 beside a model or a head, which is right more often than what follows a single token.
        prompt_lookup_max: of prompt lookup: the most tokens that are looked for.
        draft_confidence_threshold: a model or a head ends a request's drafts with the first of which it holds all to be
            right with less than this probability. None is 0.1 with `length_control="auto"`, and 0 with `fixed`.
    """

    method: str
    model: str | None = None
    num_speculative_tokens: int = 7
    length_control: str = "auto"
    draft_lengths: tuple[int, ...] = (0, 1, 3, 7)
    acceptance: str = "agreement"
    prompt_lookup: bool | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int = 4
    draft_confidence_threshold: float | None = None

    def __post_init__(self):
        choices = {"method": SPECULATIVE_METHODS, "length_control": LENGTH_CONTROLS, "acceptance": ACCEPTANCE_RULES}
        for name, values in choices.items():
            _one_of(self, name, values)
        _positive(self, "num_speculative_tokens")
        valid = self.model is None or (self.method != "ngram" and isinstance(self.model, str | Path))
        require(valid, "model", self.model, "the name of a model or a head, and None with method='ngram'")
        most = self.num_speculative_tokens
        require(most <= MAX_DRAFT_TOKENS, "num_speculative_tokens", most, f"at most {MAX_DRAFT_TOKENS}")
        self._check_lookup()
        self._default("draft_confidence_threshold", DRAFT_CONFIDENCE if self.length_control == "auto" else 0.0)
        chance = self.draft_confidence_threshold
        valid = is_number(chance) and 0 <= chance <= 1
        require(valid, "draft_confidence_threshold", chance, "None or a number from 0 to 1")
        object.__setattr__(self, "draft_confidence_threshold", float(chance))
        lengths = self.draft_lengths
        valid = isinstance(lengths, list | tuple) and all(is_integer(k) and k >= 0 for k in lengths)
        rule = "integers of at least 0, ascending"
        require(valid and list(lengths) == sorted(set(lengths)), "draft_lengths", lengths, rule)
        object.__setattr__(self, "draft_lengths", tuple(lengths))

    def _check_lookup(self) -> None:
        _one_of(self, "prompt_lookup", (None, True, False))
        alone, exact = self.method == "ngram", self.acceptance == "agreement"
        if alone:
            require(self.prompt_lookup is not False, "prompt_lookup", False, "True or None with method='ngram'")
        elif not exact:
            rule = f"False or None with method={self.method!r} and acceptance='rejection'"
            require(not self.prompt_lookup, "prompt_lookup", True, rule)
        self._default("prompt_lookup", alone or exact)
        _positive(self, "prompt_lookup_max")
        self._default("prompt_lookup_min", 1 if alone else min(2, self.prompt_lookup_max))
        _positive(self, "prompt_lookup_min")
        rule = f"at least prompt_lookup_min={self.prompt_lookup_min}"
        require(self.prompt_lookup_max >= self.prompt_lookup_min, "prompt_lookup_max", self.prompt_lookup_max, rule)

    def _default(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "SpeculativeConfig":
        """Builds from outside data; an unknown name is refused with the nearest right one."""
        check_names(cls, values)
        return cls(**values)


@no_type_check  # it checks itself: the tests' type checker would come first with another error
@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """How hidden states become an embedding; None is what the checkpoint says, and where it says nothing the last
    token's, normalised.

    Attributes:
        pooling_type: `LAST`: the hidden state of the last token. `MEAN`: the mean of all tokens'.
        normalize: whether embeddings have length 1.
    """

    pooling_type: str | None = None
    normalize: bool | None = None

    def __post_init__(self):
        _one_of(self, "pooling_type", (None, *POOLING_TYPES))
        _one_of(self, "normalize", (None, True, False))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PoolerConfig":
        """Builds from outside data; an unknown name is refused with the nearest right one."""
        check_names(cls, values)
        return cls(**values)


@no_type_check  # it checks itself: the tests' type checker would come first with another error
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every option of an engine; ValueError where a value breaks a rule, TypeError for an unknown name.

    Attributes:
        model: a folder, a GGUF file, a hub id, or None for the demo model (SmolLM2-135M-Instruct).
        tokenizer: likewise; None takes the model's own.
        dtype: of weights, activations and pages; `auto` is what the checkpoint says.
        max_model_len: tokens of prompt and output together; None is the model's own, cut to the pool.
        page_size: tokens per page of the KV cache; None is 64 with the attention backend `mosaic` and 16 with others.
        num_pages: size of the pool; None derives it from `memory_utilization`.
        memory_utilization: share of the device's memory for weights and pages together; on a CPU the pool also
            stays under 2 GiB.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens computed in one step; prompts are cut into chunks that fit.
        scheduling_policy: `fcfs` serves by arrival; `priority` lower priorities first, and a request that lacks room
            takes that of running ones of a worse priority, which are recomputed later; `fair` gives each tenant its
            share of the tokens, by priority within a tenant; `static` batch after batch, for comparison.
        priority_aging_s: with `priority`, seconds after which a request counts as one priority better, so that
            nobody waits for ever; None never.
        enable_prefix_caching: reuse the pages of equal prefixes.
        enable_chunked_prefill: False computes each prompt in one step.
        async_scheduling: plan and post-process on the host while the device computes the next step.
        attention_backend: which implementation of paged attention; `auto` is `mosaic` (Pallas kernels) on GPUs of
            compute capability 9.0, `native` (C++, built at first use) on CPUs with a compiler, `xla` elsewhere.
        linear_backend: which implementation of a layer's products; `auto` is `native` likewise, but for bfloat16
            on CPUs with AMX, `mosaic` on Hopper GPUs if `deterministic` is True, and `xla` elsewhere.
        deterministic: results do not depend on what else is in the batch. `auto` is True where that is proven
            for this backend, dtype and JAX version and confirmed by a test at start. True takes the kernels for Hopper
            on a GPU, where nothing is proven yet, and is an error where it does not hold.
        generation_config: `auto` takes the parameters of requests that bring none from the model's
            generation_config.json, `none` from SamplingParams alone.
        seed: what requests without a seed of their own derive theirs from.
        compile: `lazy` compiles a shape when it is first used, `warmup` all of them at start.
        compilation_cache_dir: None is a folder in the cache folder, "" switches the persistent cache off.
        speculative_config: a `SpeculativeConfig` or a dict of its fields turns speculative decoding on.
        runner: what the engine is for: `generate` continues texts, `pooling` makes embeddings and nothing else; `auto`
            is `pooling` for folders that say so (sentence-transformers' `modules.json`).
        pooler_config: how embeddings are made: a `PoolerConfig` or a dict of its fields.
        mesh: a `jax.sharding.Mesh` with the axis "model" to split the model over; None is one device.
    """

    model: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    memory_utilization: float = 0.9
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 128
    scheduling_policy: str = "fcfs"
    priority_aging_s: float | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    attention_backend: str = "auto"
    linear_backend: str = "auto"
    deterministic: bool | str = "auto"
    generation_config: str = "auto"
    seed: int = 0
    compile: str = "lazy"
    compilation_cache_dir: str | None = None
    speculative_config: SpeculativeConfig | None = None
    runner: str = "auto"
    pooler_config: PoolerConfig | None = None
    mesh: Any = None

    def __post_init__(self):
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            _positive(self, name)
        for name in ("max_model_len", "num_pages"):
            if getattr(self, name) is not None:
                _positive(self, name)
        _one_of(self, "dtype", DTYPES)
        _one_of(self, "compile", COMPILE_MODES)
        _one_of(self, "generation_config", GENERATION_CONFIGS)
        _one_of(self, "runner", RUNNERS)
        _one_of(self, "scheduling_policy", SCHEDULING_POLICIES)
        aging = self.priority_aging_s
        rule = "a number above 0 or None, and None unless scheduling_policy is 'priority'"
        valid = is_number(aging) and aging > 0 and self.scheduling_policy == "priority"
        require(aging is None or valid, "priority_aging_s", aging, rule)
        _one_of(self, "attention_backend", ATTENTION_BACKENDS)
        _one_of(self, "linear_backend", LINEAR_BACKENDS)
        _one_of(self, "page_size", (None, *PAGE_SIZES))
        _one_of(self, "deterministic", ("auto", True, False))
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        share = self.memory_utilization
        require(is_number(share) and 0 < share <= 1, "memory_utilization", share, "a number above 0 and at most 1")
        valid = is_integer(self.seed) and -(2**63) <= self.seed < 2**63
        require(valid, "seed", self.seed, "an integer of 64 bits, sign included")
        for name in ("model", "tokenizer", "compilation_cache_dir"):
            value = getattr(self, name)
            require(value is None or isinstance(value, str | Path), name, value, "a string, a path or None")
            require(value != "" or name == "compilation_cache_dir", name, value, "the name of something, or None")
        for name, kind in (("speculative_config", SpeculativeConfig), ("pooler_config", PoolerConfig)):
            value = getattr(self, name)
            if isinstance(value, dict):
                value = kind.from_dict(value)
                object.__setattr__(self, name, value)
            valid = value is None or isinstance(value, kind)
            require(valid, name, value, f"a {kind.__name__}, a dict of its fields or None")
        mesh = self.mesh  # told by its attribute: this module knows no JAX
        require(mesh is None or hasattr(mesh, "axis_names"), "mesh", mesh, "a jax.sharding.Mesh or None")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "EngineConfig":
        """Builds from outside data; an unknown name is refused with the nearest right one."""
        check_names(cls, values)
        return cls(**values)

    def compilation_cache(self) -> Path | None:
        """The folder of the persistent compilation cache, or None if it is off."""
        if self.compilation_cache_dir is None:
            return cache_folder() / "compiled"
        return Path(self.compilation_cache_dir) if self.compilation_cache_dir else None


def _positive(config: Any, name: str) -> None:
    value = getattr(config, name)
    require(is_integer(value) and value >= 1, name, value, "an integer of at least 1")


def _one_of(config: Any, name: str, choices: tuple) -> None:
    value = getattr(config, name)
    if any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        return
    near = nearest_name(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else None
    hint = f" (did you mean {near!r}?)" if near else ""
    require(False, name, value, f"one of {', '.join(map(repr, choices))}{hint}")
