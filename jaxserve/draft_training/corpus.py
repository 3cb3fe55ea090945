"""What a target says: its answers to prompts and its hidden states along them, in shards that survive an interruption.

A shard is an .npz file of up to `SHARD` sequences: `tokens` [n, length] (padded with 0), `lengths` [n], `starts` [n]
(where the answer begins) and `hidden` [n, length, hidden], the states after the final norm, bfloat16 as uint16.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jaxserve.engine import Engine
from jaxserve.models.decoder import Decoder
from jaxserve.sampling_params import SamplingParams

SHARD = 64
_AT_ONCE = 4  # sequences whose hidden states are computed together


class Answers(NamedTuple):
    """Sequences of one length, without their hidden states, which are most of a shard; see the module."""

    tokens: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray


class Shard(NamedTuple):
    """Sequences of one length; see the module."""

    tokens: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    hidden: np.ndarray  # float, [n, length, hidden]


def write_corpus(
    engine: Engine,
    decoder: Decoder,
    prompts: Sequence[list[int]],
    folder: Path,
    *,
    length: int,
    seed: int = 0,
    report: Callable[[int], None] = lambda count: None,
) -> None:
    """Let the engine answer the prompts and keep what the decoder, the same model, computes along them.

    A sequence is cut to `length` tokens; a prompt longer than half of that loses its beginning. Half of the answers
    are greedy, half sampled. Shards that are there are left as they are; ValueError for one of other prompts or
    another length. `report` hears of sequences done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    compute = nnx.jit(nnx.vmap(_hidden, in_axes=(None, 0)))
    for first in range(0, len(prompts), SHARD):
        some = [prompt[-(length // 2) :] for prompt in prompts[first : first + SHARD]]
        file = shard_file(folder, first // SHARD)
        if file.exists():
            _check_shard(file, some, length)
        else:
            answers = _answers(engine, some, first, length, seed)
            scratch = file.with_suffix(".part")
            with scratch.open("wb") as out:
                np.savez(out, **_shard(compute, decoder, some, answers, length))
            scratch.rename(file)
        report(len(some))


def _check_shard(file: Path, prompts: Sequence[list[int]], length: int) -> None:
    with np.load(file) as stored:
        tokens = stored["tokens"]
    same = tokens.shape == (len(prompts), length)
    if not same or any(row[: len(p)].tolist() != p for row, p in zip(tokens, prompts, strict=True)):
        raise ValueError(f"{file}: it answers other prompts or has another length: name another folder")


def read_shard(folder: Path, index: int) -> Shard:
    """One shard of a folder."""
    with np.load(shard_file(folder, index)) as stored:
        answers = [stored[name] for name in Answers._fields]
        return Shard(*answers, stored["hidden"].view(ml_dtypes.bfloat16))


def read_answers(folder: Path, num_shards: int) -> Iterator[Answers]:
    """Of the first shards of a folder all but the hidden states, which are not read."""
    for index in range(num_shards):
        with np.load(shard_file(folder, index)) as stored:
            yield Answers(*(stored[name] for name in Answers._fields))


def shard_file(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.npz"


def num_shards(num_prompts: int) -> int:
    return -(-num_prompts // SHARD)


def _answers(engine: Engine, prompts: Sequence[list[int]], first: int, length: int, seed: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        sampled = {"temperature": 0.8, "top_p": 0.95} if index % 2 else {"temperature": 0.0}
        params = SamplingParams(**sampled, max_tokens=length - len(prompt), seed=seed + first + index)
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished():
        for output in engine.step():
            answers[int(output.request_id)] += output.outputs[0].token_ids
    return answers


def _shard(compute, decoder: Decoder, prompts, answers, length: int) -> dict[str, np.ndarray]:
    count = len(prompts)
    tokens = np.zeros((-(-count // _AT_ONCE) * _AT_ONCE, length), np.int32)
    for row, prompt, answer in zip(tokens, prompts, answers, strict=False):
        row[: len(prompt) + len(answer)] = prompt + answer
    parts = [compute(decoder, tokens[at : at + _AT_ONCE]) for at in range(0, len(tokens), _AT_ONCE)]
    hidden = np.concatenate([np.asarray(part, ml_dtypes.bfloat16) for part in parts])[:count]
    return {
        "tokens": tokens[:count],
        "lengths": np.array([len(p) + len(a) for p, a in zip(prompts, answers, strict=True)], np.int32),
        "starts": np.array([len(prompt) for prompt in prompts], np.int32),
        "hidden": hidden.view(np.uint16),
    }


def _hidden(decoder: Decoder, tokens: jax.Array) -> jax.Array:
    return decoder(tokens, jnp.arange(len(tokens), dtype=jnp.int32))
