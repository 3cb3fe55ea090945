"""The engine as a model class of EleutherAI's lm-evaluation-harness, `--model jaxserve` (extra `lm-eval`).

Versions of the harness that look for plugins find it by its entry point; `python -m jaxserve.evaluation.harness` is
the harness's own command line with it registered, for those that do not.
"""

from collections.abc import Sequence
from typing import Any, no_type_check

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxserve.config import EngineConfig
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams

# The harness's names for the most new tokens; the first that is given counts.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class JaxserveLM(TemplateLM):
    """Continuous batching with prefix caching under the harness's `loglikelihood`, `loglikelihood_rolling` and
    `generate_until`.

    Keywords are those of `EngineConfig`; `pretrained` is its `model`, as other model classes have it. `max_length` is
    the context in tokens, as the harness counts it (the last token of a scored text is no input). `batch_size`,
    `max_batch_size` and `device` are accepted and ignored.
    """

    @no_type_check  # the harness passes what its command line has read
    def __init__(
        self,
        pretrained: str | None = None,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **options,
    ):
        super().__init__()
        if max_length is not None:
            options["max_model_len"] = int(max_length) + 1
        model = options.pop("model", pretrained)
        self.llm = LLM(config=EngineConfig.from_dict({"model": model, **options}))
        if self.llm.engine.tokenizer is None:
            self.llm.close()
            raise ValueError("tokenizer: the harness needs one, and this model has none")
        self._tokens = self.llm.engine.tokenizer
        self.max_gen_toks = int(max_gen_toks)
        self._bos = self._tokens.bos_token_id
        self._bos_text = "" if self._bos is None else self._tokens.decode([self._bos], skip_special_tokens=False)

    @property
    def max_length(self) -> int:
        return self.llm.engine.max_model_len - 1

    @property
    def eot_token_id(self) -> int:
        return self._tokens.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self._bos is None else self._bos

    @property
    def tokenizer_name(self) -> str:
        return str(self._tokens.folder).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.llm.chat_template.source if chat_template else None

    @no_type_check
    def apply_chat_template(self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.llm.chat_template.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    @no_type_check
    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """A text that begins with the special token already, as a chat does, gets no second one."""
        if add_special_tokens is None:
            add_special_tokens = not (self._bos_text and string.startswith(self._bos_text))
        return self._tokens.encode(string, add_special_tokens=add_special_tokens)

    # ---- scoring ----------------------------------------------------------------------------------------

    @no_type_check
    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **_) -> list[tuple[float, bool]]:
        """Equal beginnings follow each other, so that all but the first come from the prefix cache."""
        order = sorted(range(len(requests)), key=lambda index: (requests[index][1], requests[index][2]))
        pairs = [self._fitted(requests[index][1], requests[index][2]) for index in order]
        show = False if disable_tqdm else None
        scores = self.llm.score([c for c, _ in pairs], [a for _, a in pairs], use_tqdm=show) if pairs else []
        results: list = [None] * len(requests)
        for index, score in zip(order, scores, strict=True):
            if score.error is not None:
                raise RuntimeError(score.error)
            results[index] = (score.logprob, score.is_greedy)
            if requests[index][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[index][0], results[index])
        return results

    def _fitted(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Cut from the left to what fits."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise ValueError(f"max_length={self.max_length}: a continuation has {len(continuation)} tokens")
        return context[-room:], continuation

    @no_type_check
    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        windows, owners = [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            rolling = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            mine = [(None, *make_disjoint_window(pair)) for pair in rolling]
            windows += mine
            owners += [owner] * len(mine)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # ---- generation -------------------------------------------------------------------------------------

    @no_type_check
    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        if not requests:
            return []
        prompts, params = zip(*(self._prompt(*request.args) for request in requests), strict=True)
        outputs = self.llm.generate(list(prompts), list(params), use_tqdm=False if disable_tqdm else None)
        texts = []
        for request, result in zip(requests, outputs, strict=True):
            [output] = result.outputs
            if output.error is not None:
                raise RuntimeError(output.error)
            texts.append(output.text)
            self.cache_hook.add_partial("generate_until", request.args, output.text)
        return texts

    @no_type_check
    def _prompt(self, context: str, given: dict[str, Any]) -> tuple[list[int], SamplingParams]:
        """Tokens, cut from the left to leave room for the answer, and parameters."""
        given = dict(given)
        lengths = [int(given.pop(name)) for name in _LENGTHS if given.get(name) is not None]
        most = min(lengths[0] if lengths else self.max_gen_toks, self.max_length)
        until = given.pop("until", None) or []
        until = [until] if isinstance(until, str) else [text for text in until if text]
        sampled = given.pop("do_sample", None)
        temperature = float(given.pop("temperature", None) or 0.0)
        if sampled is False:
            temperature = 0.0
        others = {name: value for name, value in given.items() if value is not None and name not in _LENGTHS}
        params = {"max_tokens": most, "stop": until, "temperature": temperature, **others}
        ids = self.tok_encode(context) or [self.prefix_token_id]
        return ids[-(self.max_length + 1 - most) :], SamplingParams.from_dict(params)
