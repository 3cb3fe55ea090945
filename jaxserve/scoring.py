"""Log-likelihoods of continuations: how likely a model finds given answers. What evaluation harnesses ask for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import no_type_check

from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer

Text = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Score:
    """The log-likelihood of a continuation after its prompt.

    logprob: the sum of `token_logprobs`, natural logarithms.
    is_greedy: whether greedy decoding would give exactly this continuation.
    token_ids, token_logprobs: one entry per token of the continuation.
    num_cached_tokens: prompt tokens that came from the prefix cache.
    error: why it could not be computed (then `logprob` is NaN); None if it could.
    """

    logprob: float
    is_greedy: bool
    token_ids: list[int]
    token_logprobs: list[float]
    num_cached_tokens: int = 0
    error: str | None = None


@no_type_check  # it checks itself: the tests' type checker would come first with another error
def pair_up(prompts: Text | Sequence[Text], continuations: Text | Sequence[Text]) -> list[tuple[Text, Text]]:
    """(prompt, continuation) pairs: equally many of both, or one prompt for all continuations."""
    prompts, continuations = _several(prompts, "prompts"), _several(continuations, "continuations")
    if len(prompts) == 1 and len(continuations) > 1:
        prompts = prompts * len(continuations)
    if len(prompts) != len(continuations):
        raise ValueError(
            f"continuations: {len(continuations)} given for {len(prompts)} prompts: there must be as many, "
            "or one prompt for all"
        )
    return list(zip(prompts, continuations, strict=True))


@no_type_check
def _several(texts: Text | Sequence[Text], field: str) -> list[Text]:
    if isinstance(texts, str):
        return [texts]
    try:
        texts = list(texts)
    except TypeError:
        raise ValueError(f"{field}={texts!r}: {field} must be a text, token ids or a sequence of them") from None
    return [texts] if texts and not any(hasattr(text, "__len__") for text in texts) else texts


@no_type_check
def split_tokens(
    prompt: Text, continuation: Text, tokenizer: Tokenizer | None, *, add_special_tokens: bool = True
) -> tuple[list[int], int]:
    """The tokens of prompt and continuation together, and where the continuation begins.

    Texts are encoded together, since a token may depend on what follows; white space at the prompt's end counts
    to the continuation, as tokenizers put it in front of a word (the way of EleutherAI's evaluation harness).
    `add_special_tokens` False is for prompts that hold their own, as a chat template writes them.
    """
    if isinstance(prompt, str) != isinstance(continuation, str):
        raise ValueError("continuations: prompt and continuation must both be texts or both be token ids")
    if not isinstance(prompt, str):
        start, ids = len(prompt), [*prompt, *continuation]
    elif tokenizer is None:
        raise ValueError("prompts: text needs a tokenizer, and this engine has none; give token ids")
    else:
        kept = prompt.rstrip()
        prompt, continuation = kept, prompt[len(kept) :] + continuation
        ids = tokenizer.encode(prompt + continuation, add_special_tokens=add_special_tokens)
        start = len(tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
        if not prompt and tokenizer.bos_token_id is not None and ids[:1] != [tokenizer.bos_token_id]:
            start, ids = 1, [tokenizer.bos_token_id, *ids]  # something must stand before the first token
    if start < 1:
        raise ValueError("prompts: it holds no tokens: a continuation is scored after at least one")
    if start >= len(ids):
        raise ValueError("continuations: it adds no tokens: it must add at least one")
    return ids, start


def scoring_params(start: int) -> SamplingParams:
    """What computes a prompt, scores its tokens from position `start` on and samples nothing."""
    return SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1, prompt_logprobs_start=start)


def score_of(result: RequestOutput, start: int) -> Score:
    """The score in the result of a request with `scoring_params(start)`."""
    tokens = result.prompt_token_ids[start:]
    if result.outputs[0].error is not None:
        return Score(float("nan"), False, tokens, [], result.num_cached_tokens, result.outputs[0].error)
    entries = result.prompt_logprobs[start:]
    values = [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
    # Of equal logits greedy decoding takes the lowest id; the list holds that one.
    greedy = all(
        min(entry, key=lambda i: (entry[i].rank, i)) == token for token, entry in zip(tokens, entries, strict=True)
    )
    return Score(sum(values), greedy, tokens, values, result.num_cached_tokens)
