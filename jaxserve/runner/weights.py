"""A Flax NNX decoder flattened once: the step runs on plain arrays.

Passing NNX state through a jit call costs milliseconds a step (FACTS, "Host side"); tuples of arrays do not.
"""

from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.draft_head import DraftHead
from jaxserve.models.eagle import EagleConfig
from jaxserve.models.medusa import MedusaConfig
from jaxserve.models.weights import decoder_leaves


class Weights(NamedTuple):
    """The arrays of a model. `head` is [hidden, vocab] for tied models too: products want `[in, out]`.

    draft: those of the model or the head that proposes tokens for it, if there is one.
    """

    embed: Float[Array, "vocab hidden"]
    layers: tuple[tuple[Array, ...], ...]
    norm: tuple[Array, ...]
    head: Float[Array, "hidden vocab"]
    draft: "Weights | EagleWeights | MedusaWeights | None" = None


class EagleWeights(NamedTuple):
    """The arrays of an EAGLE head; see `models.eagle`. `head` and `embed` are None where it uses the model's."""

    layer: tuple[Array, ...]
    norm: tuple[Array, ...]  # empty where there is none
    fc: Float[Array, "target_hidden hidden"] | None
    embed: Float[Array, "vocab hidden"] | None
    head: Float[Array, "hidden draft_vocab"] | None
    token_ids: Int32[Array, " draft_vocab"] | None


class MedusaWeights(NamedTuple):
    """The arrays of Medusa heads; see `models.medusa`."""

    blocks: tuple[tuple[Array, ...], ...]
    lm_heads: tuple[Float[Array, "hidden draft_vocab"], ...]
    token_ids: Int32[Array, " draft_vocab"] | None


class ModuleDefinition(NamedTuple):
    """What is static in an NNX module: hashable, so that modules of one structure share one inner jit."""

    graph: nnx.GraphDef
    structure: jax.tree_util.PyTreeDef

    def build(self, leaves: tuple[Array, ...]) -> Any:
        """The module around these leaves, inside a jit."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.structure, leaves))


class ModelDefinition(NamedTuple):
    """What is static in a decoder."""

    config: ModelConfig
    layers: tuple[ModuleDefinition, ...]
    norm: ModuleDefinition


class EagleDefinition(NamedTuple):
    """What is static in an EAGLE head."""

    config: EagleConfig
    layer: ModuleDefinition
    norm: ModuleDefinition | None


class MedusaDefinition(NamedTuple):
    """What is static in Medusa heads, whose blocks have one structure."""

    config: MedusaConfig
    block: ModuleDefinition


def flatten(model: Decoder) -> tuple[ModelDefinition, Weights]:
    """The static and the array part of a decoder. The arrays are the model's own, but for a tied head."""
    layers = [_split(layer) for layer in model.layers]
    norm, norm_leaves = _split(model.norm)
    embed = model.embed[...]
    head = tied_head(embed) if model.head is None else model.head[...]
    definition = ModelDefinition(model.config, tuple(layer for layer, _ in layers), norm)
    return definition, Weights(embed, tuple(leaves for _, leaves in layers), norm_leaves, head)


def flatten_head(
    head: DraftHead, weights: Weights
) -> tuple[EagleDefinition | MedusaDefinition, EagleWeights | MedusaWeights]:
    """The static and the array part of a draft head for a model with these weights."""
    if isinstance(head.config, MedusaConfig):
        return _flatten_medusa(head)
    layer, leaves = _split(head.layer)
    norm, norm_leaves = (None, ()) if head.norm is None else _split(head.norm)
    fc, embed, own_head, ids = (
        None if variable is None else variable[...] for variable in (head.fc, head.embed, head.head, head.token_ids)
    )
    definition = EagleDefinition(head.config, layer, norm)
    return definition, share_head(definition, EagleWeights(leaves, norm_leaves, fc, embed, own_head, ids), weights.head)


def _flatten_medusa(head: DraftHead) -> tuple[MedusaDefinition, MedusaWeights]:
    blocks = [_split(block) for block in head.blocks]
    ids = None if head.token_ids is None else head.token_ids[...]
    weights = MedusaWeights(tuple(leaves for _, leaves in blocks), tuple(one[...] for one in head.lm_heads), ids)
    return MedusaDefinition(head.config, blocks[0][0]), weights


def share_head(definition: EagleDefinition, head: EagleWeights, target: Float[Array, "hidden vocab"]) -> EagleWeights:
    """An EAGLE head's weights with the columns of the target's head that it uses, if it has no head of its own."""
    if definition.config.own_head or head.token_ids is None:
        return head
    return head._replace(head=_columns(target, head.token_ids))


@jax.jit
def _columns(head: Float[Array, "hidden vocab"], ids: Int32[Array, " some"]) -> Float[Array, "hidden some"]:
    return head[:, ids]


@jax.jit
def tied_head(embed: Float[Array, "vocab hidden"]) -> Float[Array, "hidden vocab"]:
    """The head of a tied model: a copy."""
    return embed.T


def parameter_names(config: ModelConfig) -> Weights:
    """The dotted path of each array of `Weights`, in a tree of its structure; a tied head is "embed"."""
    paths = [leaf.path for leaf in decoder_leaves(config)]
    under = lambda prefix: tuple(path for path in paths if path.startswith(prefix))
    layers = tuple(under(f"layers.{index}.") for index in range(config.num_layers))
    return Weights._make(("embed", layers, under("norm."), "embed" if config.tie_word_embeddings else "head", None))


def _split(module: nnx.Module) -> tuple[ModuleDefinition, tuple[Array, ...]]:
    graph, state = nnx.split(module)
    leaves, structure = jax.tree.flatten(state)
    return ModuleDefinition(graph, structure), tuple(leaves)
