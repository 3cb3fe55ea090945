"""A Flax NNX decoder flattened once: the step runs on plain arrays.

Passing NNX state through a jit call costs milliseconds a step (FACTS, "Host side"); tuples of arrays do not.
"""

from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.weights import decoder_leaves


class Weights(NamedTuple):
    """The arrays of a model. `head` is [hidden, vocab] for tied models too: products want `[in, out]`.

    draft: those of the model that proposes tokens for it, if there is one.
    """

    embed: Float[Array, "vocab hidden"]
    layers: tuple[tuple[Array, ...], ...]
    norm: tuple[Array, ...]
    head: Float[Array, "hidden vocab"]
    draft: "Weights | None" = None


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


def flatten(model: Decoder) -> tuple[ModelDefinition, Weights]:
    """The static and the array part of a decoder. The arrays are the model's own, but for a tied head."""
    layers = [_split(layer) for layer in model.layers]
    norm, norm_leaves = _split(model.norm)
    embed = model.embed[...]
    head = tied_head(embed) if model.head is None else model.head[...]
    definition = ModelDefinition(model.config, tuple(layer for layer, _ in layers), norm)
    return definition, Weights(embed, tuple(leaves for _, leaves in layers), norm_leaves, head)


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
