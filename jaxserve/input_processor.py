"""From what a user hands over to a request: every check before the engine's loop. Knows no schedule and no device."""

from collections.abc import Sequence
from time import monotonic
from typing import Any, no_type_check

import numpy as np

from jaxserve.beam_search import BeamSearch, BeamSearchParams
from jaxserve.models.config import ModelConfig
from jaxserve.pooling import PooledPrompt, Pooler
from jaxserve.pooling_params import PoolingParams
from jaxserve.request import Request, RequestGroup
from jaxserve.sampling.tables import build_tables
from jaxserve.sampling_params import SamplingParams, child_seed
from jaxserve.structured.compiler import Constraint, GrammarCompiler
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.validation import is_integer, require

Prompt = str | Sequence[int] | np.ndarray | dict
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class InputProcessor:
    """Checks prompts and parameters against one model, and builds requests from them.

    Every method raises ValueError, naming field, value and rule, for what the engine could not honour.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        *,
        seed: int,
        defaults: SamplingParams,
        scheduling_policy: str = "fcfs",
        pooler: Pooler | None = None,
    ):
        """`pooler` is that of an engine for embeddings."""
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.defaults = defaults
        self.pooler = pooler
        self._seed = seed
        self._scheduling_policy = scheduling_policy
        self._arrivals = 0
        self._grammars = None if tokenizer is None else GrammarCompiler(tokenizer, model_config.vocab_size)

    @no_type_check  # it checks itself: the tests' type checker would come first with another error
    def build(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | BeamSearchParams | None,
        arrival_time: float | None = None,
    ) -> RequestGroup:
        """The branches of a new request; `params` None takes the model's defaults."""
        asked = self.defaults if params is None else params
        params = self._sampling_params(asked)
        text, ids, salt = self._checked(prompt, params)
        stops = self._stops(params)
        tables = build_tables(params, self.model_config.vocab_size, stops, self._encode_word)
        limit = self.max_model_len if params.max_tokens is None else len(ids) + params.max_tokens
        self._arrivals += 1
        arrival_time = monotonic() if arrival_time is None else arrival_time
        seed = params.seed if params.seed is not None else child_seed(self._seed, self._arrivals)
        search = self._search(asked, self.max_model_len - len(ids)) if isinstance(asked, BeamSearchParams) else None
        group = RequestGroup(request_id, text, ids, params, [], search)
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
                priority=params.priority,
                tenant=params.tenant,
                cache_salt=params.cache_salt if salt is None else salt,
                fork_of=group.branches[0] if index else None,
                tables=tables,
                constraint=self._constraint(params),
                num_following=0 if search is None else search.num_candidates,
                pooled=PooledPrompt(self.pooler, asked, len(ids)) if isinstance(asked, PoolingParams) else None,
                arrival_time=arrival_time,
            )
            group.branches.append(request)
        return group

    @no_type_check
    def check(self, prompt: Prompt, params: SamplingParams | PoolingParams | BeamSearchParams) -> dict[str, Any]:
        """Everything that `build` checks, and the prompt as it takes it with the least work: ids and text.

        Changes nothing, so a front may call it in any thread while the engine runs.
        """
        params = self._sampling_params(params)
        text, ids, salt = self._checked(prompt, params)
        build_tables(params, self.model_config.vocab_size, self._stops(params), self._encode_word)
        if params.structured_outputs is not None:
            self._grammars.compile(params.structured_outputs)
        checked = {"prompt_token_ids": ids, "prompt": text, "cache_salt": salt}
        return {key: value for key, value in checked.items() if value is not None}

    @no_type_check
    def _sampling_params(self, asked: SamplingParams | PoolingParams | BeamSearchParams) -> SamplingParams:
        """How the engine computes what is asked for, if it is made for that."""
        if isinstance(asked, SamplingParams | BeamSearchParams):
            if self.pooler is not None:
                raise ValueError("runner='pooling': this engine makes embeddings only: runner must be 'generate' here")
            beams = isinstance(asked, BeamSearchParams)
            return self._search(asked, 1).request_params(self.model_config.vocab_size) if beams else asked
        if not isinstance(asked, PoolingParams):
            rule = "params must be a SamplingParams, a PoolingParams or a BeamSearchParams"
            raise ValueError(f"params={asked!r}: {rule}")
        if self.pooler is None:
            raise ValueError(
                "runner='generate': this model is not made for embeddings: its folder has no modules.json of "
                "sentence-transformers that says so; runner must be 'pooling' to make them all the same"
            )
        size = self.model_config.hidden_size
        rule = f"at most {size}, the size of this model's embeddings"
        require(asked.dimensions is None or asked.dimensions <= size, "dimensions", asked.dimensions, rule)
        return asked.sampling_params()

    @no_type_check
    def _checked(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int], str | None]:
        text, ids, salt = self._prompt(prompt)
        self._check_length(ids, params)
        self._check_params(params)
        return text, ids, salt

    def encode(self, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """The token ids of a text. One that must be too long is refused before the tokenizer has worked on it."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError(f"{field}: text needs a tokenizer, and this engine has none; give token ids")
        if len(text) > self.max_model_len and tokenizer.longest_token is not None:
            most = self.max_model_len * tokenizer.longest_token
            if len(text) > most:
                rule = f"must be at most {most}, since {self.max_model_len} tokens hold no more"
                raise ValueError(f"{field}: {len(text)} characters: {rule}")
        return tokenizer.encode(text, add_special_tokens=add_special_tokens, field=field)

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        """What an output's form is checked with, at its start."""
        if params.structured_outputs is None:
            return None
        ends = () if params.ignore_eos else self.model_config.eos_token_ids
        return self._grammars.start(params.structured_outputs, ends)

    def _search(self, params: BeamSearchParams, room: int) -> BeamSearch:
        """A beam search for at most `room` tokens."""
        ends = frozenset() if params.ignore_eos else frozenset(self.model_config.eos_token_ids)
        return BeamSearch(params, ends, min(params.max_tokens, room))

    def _stops(self, params: SamplingParams) -> set[int]:
        """The ids that end a request."""
        return {*params.stop_token_ids, *(() if params.ignore_eos else self.model_config.eos_token_ids)}

    @no_type_check
    def _prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """Text (None if there is none), token ids, and the cache salt that the prompt brought along."""
        text, salt = prompt if isinstance(prompt, str) else None, None
        if isinstance(prompt, dict):
            text, prompt, salt = _open(prompt)
        if isinstance(prompt, str):
            ids = self.encode(prompt)
        elif _is_sequence(prompt):
            ids = [int(i) if isinstance(i, np.integer) else i for i in prompt]
        else:
            raise ValueError(f"prompt: {type(prompt).__name__}: must be text or a sequence of token ids")
        self._check_ids("prompt_token_ids", ids)
        if not ids:
            raise ValueError("prompt: it holds no tokens: it must hold at least one")
        return text, ids, salt

    def _check_length(self, ids: list[int], params: SamplingParams) -> None:
        longest = self.max_model_len - (params.max_tokens != 0)
        if len(ids) > longest:
            raise ValueError(
                f"prompt: {len(ids)} tokens: must be fewer than max_model_len={self.max_model_len}, "
                "which counts prompt and output together"
                if params.max_tokens != 0
                else f"prompt: {len(ids)} tokens: must be at most max_model_len={self.max_model_len}"
            )

    def _check_params(self, params: SamplingParams) -> None:
        if params.priority and self._scheduling_policy not in ("priority", "fair"):
            rule = "priority must be 0 unless scheduling_policy is 'priority' or 'fair'"
            raise ValueError(f"priority={params.priority}: {rule}")
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", list(params.logit_bias or ()))
        for field in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, field) and self.tokenizer is None:
                raise ValueError(f"{field}={getattr(params, field)!r}: {field} needs a tokenizer: this engine has none")

    def _encode_word(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False, field="bad_words")

    @no_type_check
    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        vocab = self.model_config.vocab_size
        wrong = [i for i in ids if not is_integer(i) or not 0 <= i < vocab]
        if wrong:
            raise ValueError(f"{field}: {wrong[:8]}: must be integers from 0 to {vocab - 1}, the model's vocabulary")


@no_type_check
def _open(prompt: dict) -> tuple[str | None, Any, str | None]:
    """Text, what is to be computed (the ids if there are any, else the text), and salt of a prompt in a dict."""
    if not prompt.keys() & {"prompt", "prompt_token_ids"} or not prompt.keys() <= _PROMPT_KEYS:
        raise ValueError(
            f"prompt: keys {list(prompt)}: must be 'prompt' or 'prompt_token_ids', or both, and maybe 'cache_salt'"
        )
    for key in prompt.keys() - {"cache_salt"}:
        if isinstance(prompt[key], str) != (key == "prompt"):
            kind = type(prompt[key]).__name__
            raise ValueError(f"{key}: {kind}: 'prompt' must be text, 'prompt_token_ids' token ids")
    salt = SamplingParams(cache_salt=prompt["cache_salt"]).cache_salt if "cache_salt" in prompt else None
    text = prompt.get("prompt")
    return text, prompt.get("prompt_token_ids", text), salt


def _is_sequence(prompt: object) -> bool:
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1
    return isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray | memoryview)
