"""The loop that trains an EAGLE-1 head on a corpus. Parameters, optimizer and batches depend on the options alone, and
all of them are stored, so that an interrupted run ends with the parameters of one that was not.

The head is trained as it is used: `DEPTH` drafts deep, each continuing the states of the one before ("training-time
test" of EAGLE-3). The d-th draft at position p attends to the keys that a proposal has there: those of the first
depth up to position p - d + 1, then one of each depth that followed. At each depth the loss is the cross-entropy
against the target's distribution, both over the draft vocabulary, and the smooth L1 distance to its state (EAGLE-1).
Only the last epochs go that deep: a step of one draft takes a quarter of the time, and what a head has to learn most of
is the first one.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.draft_training.corpus import Shard, read_answers, read_shard
from jaxserve.draft_training.options import DEPTH, TrainingOptions
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder, rope_tables
from jaxserve.models.draft_head import random_head
from jaxserve.models.eagle import EagleConfig, EagleHead, layer_inputs

Params = Any  # an nnx.State, whose annotation type checkers cannot read

SAVE_EVERY = 50  # steps


class Trained(NamedTuple):
    """losses: of each step. accuracy: of sequences that were not trained on, after each epoch, how often the d-th draft
    is the target's likeliest token where the target's own tokens stand before it."""

    head: EagleHead
    losses: list[float]
    accuracy: list[list[float]]


class State(NamedTuple):
    params: Params
    optimizer: optax.OptState


def train(
    target: Decoder,
    corpus: Path,
    shards: int,
    options: TrainingOptions,
    folder: Path,
    *,
    report: Callable[..., None] = lambda count, **now: None,
    stop_after: int | None = None,
) -> Trained:
    """Train a head on the first `shards` shards (the last of several is not trained on), going on with what `folder`
    holds of an earlier run with the same options. `report` hears of every step: how many more are done, `of` how many,
    and the loss. `stop_after` ends the run early.
    """
    head = _new_head(target, corpus, shards, options)
    graph, params, rest = nnx.split(head, nnx.Param, ...)
    sizes = [len(answers.tokens) for answers in read_answers(corpus, shards)]
    trained_on = sizes[:-1] or sizes
    per_epoch = sum(-(-size // options.batch_size) for size in trained_on)
    steps = per_epoch * options.epochs
    about = {**asdict(options), "steps": steps}  # with the corpus' size: another one has other batches
    state = State(params, _optimizer(options, steps).init(params))
    state, losses, accuracy = _restore(folder, about, state)
    report(len(losses), of=steps)
    weights = _target_weights(target, head)
    for epoch in range(len(accuracy), options.epochs):
        depth = options.depth(epoch)
        batches = _batches(corpus, len(trained_on), options, epoch)
        for index, batch in enumerate(batches, epoch * per_epoch):
            if index < len(losses):
                continue
            state, loss = _update(graph, options, steps, depth, state, rest, weights, batch)
            losses.append(float(loss))
            report(1, of=steps, loss=losses[-1])
            if len(losses) % SAVE_EVERY == 0:
                _save(folder, about, state, losses, accuracy)
            if len(losses) == stop_after:
                _save(folder, about, state, losses, accuracy)
                return Trained(nnx.merge(graph, state.params, rest), losses, accuracy)
        measure = partial(_correct, graph, state.params, rest, weights)
        accuracy.append(_accuracy(measure, corpus, len(sizes) - 1, options))
        _save(folder, about, state, losses, accuracy)
    return Trained(nnx.merge(graph, state.params, rest), losses, accuracy)


def _new_head(target: Decoder, corpus: Path, shards: int, options: TrainingOptions) -> EagleHead:
    """A head of the target's own shape. It begins by handing on the state that it gets. It sees the whole text, though
    it is trained on short ones: with a window as long as those it is right less often in long texts."""
    config = target.config
    layer = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=1,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_theta=config.rope_theta,
        windows=(None,),
        uses_rope=(True,),
    )
    ids = None
    if options.draft_vocab is not None and options.draft_vocab < config.vocab_size:
        counts = np.zeros(config.vocab_size, np.int64)
        for answers in read_answers(corpus, shards):
            for tokens, length, start in zip(*answers, strict=True):
                np.add.at(counts, tokens[start:length], 1)
        ids = np.sort(np.argsort(-counts, kind="stable")[: options.draft_vocab])
    known = None if ids is None else len(ids)
    described = EagleConfig(
        method="eagle", layer=layer, vocab_size=config.vocab_size, target_hidden=config.hidden_size, draft_vocab=known
    )
    head = random_head(described, options.seed, token_ids=ids)
    hidden = config.hidden_size
    head.layer.fc[...] = head.layer.fc[...].at[hidden:].set(jnp.eye(hidden))
    for matrix in (head.layer.out, head.layer.down):
        matrix[...] = matrix[...] * 0.1
    return head


def _optimizer(options: TrainingOptions, steps: int) -> optax.GradientTransformation:
    def schedule(count: Array) -> Array:
        done = count.astype(jnp.float32) / steps
        return options.learning_rate * jnp.minimum(done * 20, (1.05 + jnp.cos(jnp.pi * done)) / 2.05)

    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01))


def _compute_dtype() -> Any:
    """bfloat16, but for CPUs: XLA's products with transposed matrices, of which gradients are made, are slow there."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


class TargetWeights(NamedTuple):
    """What the loss needs of the target; `columns` are those of the head that the draft head knows."""

    embed: Float[Array, "vocab hidden"]
    columns: Float[Array, "hidden draft_vocab"]
    head: Float[Array, "hidden vocab"]


def _target_weights(target: Decoder, head: EagleHead) -> TargetWeights:
    dtype = _compute_dtype()
    embed = target.embed[...].astype(dtype)
    whole = embed.T if target.head is None else target.head[...].astype(dtype)
    columns = whole if head.token_ids is None else whole[:, head.token_ids[...]]
    return TargetWeights(embed, columns, whole)


# ---- the loss -------------------------------------------------------------------------------------------


def _drafted(
    graph: nnx.GraphDef, depth: int, params: Params, rest: Params, target: TargetWeights, shard: Shard
) -> list[Float[Array, "n length hidden"]]:
    """The states of each depth up to `depth`."""
    dtype = target.embed.dtype
    head = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(dtype), params), rest)
    hidden = shard.hidden.astype(dtype)
    return jax.vmap(partial(_sequence, head.layer, head.config.layer, depth, target.embed))(shard.tokens, hidden)


def _sequence(
    layer: nnx.Module, config: ModelConfig, depth: int, embed: Array, tokens: Array, hidden: Array
) -> list[Array]:
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    tables = rope_tables(config, positions)
    embedded, states, keys = embed[tokens], [], []
    before = jnp.roll(hidden, 1, axis=0)
    for _ in range(depth):
        inputs = layer_inputs(embedded, before, positions == 0)
        states.append(layer(inputs, tables, partial(_attend, keys)))
        before = jnp.roll(states[-1], 1, axis=0)
    return states


def _attend(keys: list[tuple[Array, Array]], q: Array, k: Array, v: Array, *, scale: float, window: int | None):
    """Attention of one depth; `keys` are those of the depths before, and get this one's."""
    keys.append((k, v))
    tokens, heads, dim = q.shape
    grouped = q.reshape(tokens, k.shape[1], heads // k.shape[1], dim)
    deep, positions = len(keys) - 1, jnp.arange(tokens, dtype=jnp.int32)
    wide = {"preferred_element_type": jnp.float32}
    scores = jnp.einsum("qkgd,jkd->qkgj", grouped, keys[0][0], **wide) * scale
    visible = positions[None, :] <= positions[:, None] - deep
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    own = []  # of the depths after the first, one key each: d positions back is what the depth d before this one left
    for back, (depth_k, depth_v) in enumerate(keys[:0:-1]):
        depth_k, depth_v = jnp.roll(depth_k, back, axis=0), jnp.roll(depth_v, back, axis=0)
        score = jnp.einsum("qkgd,qkd->qkg", grouped, depth_k, **wide) * scale
        own.append((jnp.where((positions >= back)[:, None, None], score, -jnp.inf), depth_v))
    together = jnp.concatenate([scores, *(score[..., None] for score, _ in own)], axis=-1)
    weights = jax.nn.softmax(together, axis=-1).astype(v.dtype)
    mixed = jnp.einsum("qkgj,jkd->qkgd", weights[..., :tokens], keys[0][1], **wide)
    for index, (_, depth_v) in enumerate(own):
        mixed += (weights[..., tokens + index, None] * depth_v[:, :, None]).astype(jnp.float32)
    return mixed.reshape(tokens, heads, dim).astype(q.dtype)


def _trained(shard: Shard, depth: int) -> Array:
    """Which positions are trained at a depth: those with all their inputs. What the target would say next within a
    prompt is as good to learn as what it said in the answer."""
    positions = jnp.arange(shard.tokens.shape[1], dtype=jnp.int32)[None]
    return (positions < shard.lengths[:, None]) & (positions >= depth)


def _judged(shard: Shard, depth: int) -> Array:
    """And of those the ones that draft a token of the answer."""
    positions = jnp.arange(shard.tokens.shape[1], dtype=jnp.int32)[None]
    return _trained(shard, depth) & (positions + 1 >= shard.starts[:, None])


def _loss(graph: nnx.GraphDef, depth: int, params: Params, rest: Params, target: TargetWeights, shard: Shard) -> Array:
    states = _drafted(graph, depth, params, rest, target, shard)
    wanted = jax.nn.softmax(_logits(shard.hidden, target.columns))
    total = jnp.float32(0)
    for index, state in enumerate(states, 1):
        entropy = optax.softmax_cross_entropy(_logits(state, target.columns), wanted)
        distance = optax.huber_loss(state.astype(jnp.float32), shard.hidden.astype(jnp.float32)).mean(-1)
        counts = _trained(shard, index)
        count = jnp.maximum(counts.sum(), 1).astype(jnp.float32)
        total += jnp.where(counts, entropy + distance, 0).sum() / count
    return total / len(states)


def _logits(states: Array, columns: Array) -> Array:
    return jnp.einsum("nth,hv->ntv", states.astype(columns.dtype), columns, preferred_element_type=jnp.float32)


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=4)
def _update(
    graph: nnx.GraphDef,
    options: TrainingOptions,
    steps: int,
    depth: int,
    state: State,
    rest: Params,
    target: TargetWeights,
    shard: Shard,
) -> tuple[State, Array]:
    loss, gradients = jax.value_and_grad(partial(_loss, graph, depth))(state.params, rest, target, shard)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integers
        optimizer = _optimizer(options, steps)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), optimizer_state), loss


@partial(jax.jit, static_argnums=0)
def _correct(graph: nnx.GraphDef, params: Params, rest: Params, target: TargetWeights, shard) -> tuple[Array, Array]:
    """How many drafts of each depth were right, of how many."""
    states = _drafted(graph, DEPTH, params, rest, target, shard)
    likeliest = _logits(shard.hidden, target.head).argmax(-1)
    ids = jax.tree.leaves(rest)
    right = []
    for depth, state in enumerate(states, 1):
        drafted = _logits(state, target.columns).argmax(-1)
        drafted = ids[0][drafted] if ids else drafted
        right.append(((drafted == likeliest) & _judged(shard, depth)).sum())
    return jnp.stack(right), jnp.stack([_judged(shard, depth).sum() for depth in range(1, DEPTH + 1)])


def _accuracy(measure: Callable, corpus: Path, index: int, options: TrainingOptions) -> list[float]:
    shard = read_shard(corpus, index)
    counted = [measure(part) for part in _parts(shard, np.arange(len(shard.tokens)), options)]
    right, of = (np.sum(np.stack(values), axis=0) for values in zip(*counted, strict=True))
    return (right / np.maximum(of, 1)).tolist()


# ---- batches and files ----------------------------------------------------------------------------------


def _batches(corpus: Path, shards: int, options: TrainingOptions, epoch: int) -> Iterator[Shard]:
    generator = np.random.default_rng((options.seed, epoch))
    for index in range(shards):
        shard = read_shard(corpus, index)
        yield from _parts(shard, generator.permutation(len(shard.tokens)), options)


def _parts(shard: Shard, order: np.ndarray, options: TrainingOptions) -> Iterator[Shard]:
    """Batches of one size; what is missing in the last are sequences of length 0."""
    for first in range(0, len(order), options.batch_size):
        rows = order[first : first + options.batch_size]
        part = Shard(*(values[rows] for values in shard))
        fill = options.batch_size - len(rows)
        yield Shard(*(np.concatenate([values, np.zeros((fill, *values.shape[1:]), values.dtype)]) for values in part))


def _save(folder: Path, run: dict[str, Any], state: State, losses: list[float], accuracy: list) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / "state.part"
    about = json.dumps({"run": run, "losses": losses, "accuracy": accuracy})
    with scratch.open("wb") as out:
        leaves = {str(index): np.asarray(leaf) for index, leaf in enumerate(jax.tree.leaves(state))}
        np.savez(out, about=np.array(about), **leaves)
    scratch.rename(folder / "state.npz")


def _restore(folder: Path, run: dict[str, Any], state: State) -> tuple[State, list[float], list[list[float]]]:
    """What an earlier run left; ValueError if it had other options or another corpus."""
    file = folder / "state.npz"
    if not file.exists():
        return state, [], []
    with np.load(file) as stored:
        about = json.loads(str(stored["about"]))
        if about.get("run") != run:
            held = about.get("run")
            raise ValueError(f"{file}: it holds a run with other options or of another corpus: {held}")
        leaves, structure = jax.tree.flatten(state)
        leaves = [jnp.asarray(stored[str(index)]) for index in range(len(leaves))]
    return jax.tree.unflatten(structure, leaves), about["losses"], about["accuracy"]
