"""Draft heads of random tensors under their published names, and what they draft by the published recipes, in NumPy."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from engine_tools import TINY
from flax import nnx
from safetensors.numpy import save_file

from jaxserve.models.decoder import Decoder, causal_attention
from jaxserve.models.draft_head import random_head
from jaxserve.models.eagle import EagleConfig, EagleHead
from jaxserve.models.medusa import MedusaConfig, MedusaHeads

HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, DIM = 64, 96, 300, 4, 2, 16
EPS, THETA = 1e-5, 10000.0
DRAFT_IDS = np.arange(3, VOCAB, 3)  # a reduced draft vocabulary
LONGEST = 96
MEDUSA_HEADS, MEDUSA_LAYERS = 4, 2
AUX = (0, 1, 2)  # the tiny target has two layers


def head_tensors(method: str, *, reduced: bool, bias: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """All tensors of a head as they are published: matrices [out, in]."""
    random = np.random.default_rng(seed)
    matrix = lambda rows, columns: (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)
    vector = lambda: (1 + 0.2 * random.standard_normal(HIDDEN)).astype(np.float32)
    if method == "medusa":
        tensors = {}
        for head in range(MEDUSA_HEADS):
            for layer in range(MEDUSA_LAYERS):
                name = f"blocks.{head}.layers.{layer}."
                tensors[name + "weight"] = matrix(HIDDEN, HIDDEN)
                if bias:
                    tensors[name + "bias"] = 0.2 * vector()
            tensors[f"lm_heads.{head}.weight"] = matrix(len(DRAFT_IDS) if reduced else VOCAB, HIDDEN)
        return tensors | ({"token_map": random.permutation(DRAFT_IDS)} if reduced else {})
    third = method == "eagle3"
    layer = "midlayer." if third else "layers.0."
    wide = 2 * HIDDEN if third else HIDDEN
    tensors = {
        layer + "self_attn.q_proj.weight": matrix(HEADS * DIM, wide),
        layer + "self_attn.k_proj.weight": matrix(KV_HEADS * DIM, wide),
        layer + "self_attn.v_proj.weight": matrix(KV_HEADS * DIM, wide),
        layer + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * DIM),
        layer + "mlp.gate_proj.weight": matrix(FFN, HIDDEN),
        layer + "mlp.up_proj.weight": matrix(FFN, HIDDEN),
        layer + "mlp.down_proj.weight": matrix(HIDDEN, FFN),
        layer + "post_attention_layernorm.weight": vector(),
        "fc.weight": matrix(HIDDEN, (len(AUX) if third else 2) * HIDDEN),
    }
    if bias:
        tensors["fc.bias"] = (0.2 * random.standard_normal(HIDDEN)).astype(np.float32)
    if third:
        tensors[layer + "input_layernorm.weight"] = vector()
        tensors[layer + "hidden_norm.weight"] = vector()
        tensors["norm.weight"] = vector()
        tensors["lm_head.weight"] = matrix(len(DRAFT_IDS) if reduced else VOCAB, HIDDEN)
    if reduced:
        tensors["d2t"] = DRAFT_IDS - np.arange(len(DRAFT_IDS))
        tensors["t2d"] = np.isin(np.arange(VOCAB), DRAFT_IDS)
    return tensors


def write_head(folder: Path, method: str, tensors: dict[str, np.ndarray], **changes) -> Path:
    """A folder as published."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **TINY,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "architectures": ["LlamaForCausalLMEagle3" if method == "eagle3" else "LlamaForCausalLM"],
        **({"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX)}} if method == "eagle3" else {}),
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def tiny_head(target: Decoder, token_ids: np.ndarray, *, third: bool = False) -> EagleHead:
    """A random EAGLE head, -1 or -3, of the target's own shape that knows some of its tokens."""
    layer = replace(target.config, num_layers=1, windows=(None,), uses_rope=(True,), tie_word_embeddings=False)
    sizes = {"vocab_size": layer.vocab_size, "target_hidden": layer.hidden_size, "draft_vocab": len(token_ids)}
    kind = {"method": "eagle3", "aux_layers": AUX, "own_head": True} if third else {"method": "eagle"}
    config = EagleConfig(layer=layer, **sizes, **kind)
    return random_head(config, token_ids=token_ids, dtype=target.embed[...].dtype)


def tiny_medusa(target: Decoder, token_ids: np.ndarray, num_heads: int = 3) -> MedusaHeads:
    """Random Medusa heads that know some of the target's tokens."""
    sizes = {"vocab_size": target.config.vocab_size, "target_hidden": target.config.hidden_size}
    config = MedusaConfig(**sizes, draft_vocab=len(token_ids), num_heads=num_heads)
    return random_head(config, token_ids=token_ids, dtype=target.embed[...].dtype)


@partial(nnx.jit, static_argnames="third")
def _states(decoder, tokens, third: bool):
    """The states after the final norm, or those between the layers `AUX`, side by side."""
    positions = jnp.arange(LONGEST, dtype=jnp.int32)
    if not third:
        return decoder(tokens, positions)
    hidden, tables = decoder.embed_tokens(tokens), decoder.rope(positions)
    between = [hidden]
    for layer in decoder.layers:
        hidden = layer(hidden, tables, causal_attention)
        between.append(hidden)
    return jnp.concatenate([between[index] for index in AUX], axis=1)


class Recipe:
    """Drafts of a head over a target, in float64, from the tensors as they are stored."""

    def __init__(self, method: str, tensors: dict[str, np.ndarray], decoder, window: int = LONGEST):
        self.method, self.third, self.window = method, method == "eagle3", window
        plain = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
        maps = "d2t", "t2d", "token_map"
        self.w = {name: value.astype(np.float64) for name, value in plain.items() if name not in maps}
        self.decoder = decoder
        self.embed = np.asarray(decoder.embed[...], np.float64)
        self.head = self.w.get("lm_head.weight", self.embed)  # [tokens, hidden]; the tiny target's is tied
        self.ids = np.arange(VOCAB)
        if "d2t" in tensors:
            self.ids = np.arange(len(tensors["d2t"])) + tensors["d2t"]
            self.head = self.w.get("lm_head.weight", self.embed[self.ids])
        if "token_map" in tensors:
            self.ids = tensors["token_map"]

    def drafts(self, tokens: list[int], count: int, least_chance: float = 0.0) -> tuple[list[int], float]:
        """`count` tokens after these, and how far ahead of the second the likeliest was at least. The last is the first
        at which the product of the likeliest ones' probabilities is below `least_chance`; how near it came to that
        counts like how near the second came to the likeliest."""
        states = list(self.target_states(tokens[:-1]))
        drafted, margin, text, chance = [], np.inf, list(tokens), 1.0
        for index in range(count):
            logits = self._guess(index, states[-1]) if self.method == "medusa" else self._continue(text, states)
            first, second = np.sort(logits)[:-3:-1]
            margin = min(margin, first - second)
            drafted.append(int(self.ids[logits.argmax()]))
            text.append(drafted[-1])
            chance /= np.exp(logits - first).sum()
            margin = min(margin, abs(chance - least_chance) if least_chance else np.inf)
            if chance < least_chance:
                break
        return drafted, margin

    def _guess(self, head: int, x: np.ndarray) -> np.ndarray:
        """Logits of a Medusa head from the last state of the target."""
        for layer in range(MEDUSA_LAYERS):
            name = f"blocks.{head}.layers.{layer}."
            y = self.w[name + "weight"] @ x + self.w.get(name + "bias", 0)
            x = x + y / (1 + np.exp(-y))
        return self.w[f"lm_heads.{head}.weight"] @ x

    def _continue(self, text: list[int], states: list[np.ndarray]) -> np.ndarray:
        """Logits of an EAGLE head, which adds its own state to the others."""
        states.append(self._next_state(text, states))
        return self.head @ (self._norm(states[-1], "norm.weight") if self.third else states[-1])

    def target_states(self, tokens: list[int]) -> np.ndarray:
        """What the head is given of the target for each of these tokens."""
        padded = jnp.zeros(LONGEST, jnp.int32).at[: len(tokens)].set(jnp.array(tokens, jnp.int32))
        chosen = np.asarray(_states(self.decoder, padded, self.third), np.float64)[: len(tokens)]
        return chosen @ self.w["fc.weight"].T if self.third else chosen

    def _next_state(self, text: list[int], states: list[np.ndarray]) -> np.ndarray:
        """The layer at the last token, over all tokens and the states before them; no state precedes the first."""
        last = len(text) - 1
        embedded = np.concatenate([np.zeros((1, HIDDEN)), self.embed[text[1:]]])
        before = np.stack([np.zeros(HIDDEN), *states[:last]])
        if self.third:
            names = "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"
            x = np.concatenate([self._norm(*one) for one in zip((embedded, before), names, strict=True)], axis=1)
            residual = before[last]
        else:
            x = np.concatenate([embedded, before], axis=1) @ self.w["fc.weight"].T + self.w.get("fc.bias", 0)
            residual = x[last]
        residual = residual + self._attention(x)
        y = self._norm(residual, "layers.0.post_attention_layernorm.weight")
        gate, up = (self.w[f"layers.0.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        return residual + self.w["layers.0.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    def _attention(self, x: np.ndarray) -> np.ndarray:
        """Of the last row to all rows of its window."""
        project = lambda name, heads: (x @ self.w[f"layers.0.self_attn.{name}_proj.weight"].T).reshape(-1, heads, DIM)
        q, k, v = project("q", HEADS), project("k", KV_HEADS), project("v", KV_HEADS)
        q, k, v = self._rotate(q)[-1], self._rotate(k)[-self.window :], v[-self.window :]
        mixed = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            weights = np.exp(k[:, group] @ q[head] / np.sqrt(DIM))
            mixed.append(weights @ v[:, group] / weights.sum())
        return self.w["layers.0.self_attn.o_proj.weight"] @ np.concatenate(mixed)

    @staticmethod
    def _rotate(x: np.ndarray) -> np.ndarray:
        angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(0, DIM, 2) / DIM)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.w[name] * x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
