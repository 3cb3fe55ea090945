"""Makes the golden models of `tiny/`, one `.npz` a family, with torch and transformers.

    python tests/goldens/make_tiny_goldens.py        (needs torch, transformers 5; takes seconds)

Every model is random and float32. Its weights are representable in bfloat16, which halves the files and lets
a bfloat16 test start from the same values. Read them with `tests/golden_models.py`.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

FOLDER = Path(__file__).parent / "tiny"
CONTINUATION = 64
TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def rope(kind: str, theta: float = 10_000.0, **rest) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **rest}}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHORT = {"max_position_embeddings": 32}
# name: (config class, its fields beyond TINY, prompt length, max_model_len of rope `dynamic`)
MODELS = {
    "llama2": (LlamaConfig, {"num_key_value_heads": 4}, 24, None),
    "llama_biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}, 24, None),
    "llama3": (LlamaConfig, rope("llama3", 500_000.0, **LLAMA3), 48, None),
    "linear": (LlamaConfig, rope("linear", factor=4.0), 48, None),
    "yarn": (LlamaConfig, rope("yarn", factor=4.0, original_max_position_embeddings=32), 48, None),
    "dynamic": (LlamaConfig, SHORT | rope("dynamic", factor=2.0), 48, 48 + CONTINUATION),
    "dynamic_prompt": (LlamaConfig, SHORT | rope("dynamic", factor=2.0), 80, 80),
    "smollm3": (SmolLM3Config, {"num_hidden_layers": 4, "tie_word_embeddings": True}, 24, None),
    "mistral": (MistralConfig, {"sliding_window": 8}, 24, None),
    "qwen2": (
        Qwen2Config,
        {"tie_word_embeddings": True, "num_hidden_layers": 3}
        | {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
        24,
        None,
    ),
    "qwen3": (Qwen3Config, {"head_dim": 32}, 24, None),
}
OLD_STYLE = ("llama3", "linear", "dynamic")  # written as before transformers 5: rope_theta and rope_scaling


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Fills every parameter so that norms and biases matter and the logits are far from flat."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            values = 0.3 * noise
        elif parameter.ndim == 1:
            values = 1 + 0.3 * noise
        elif "embed_tokens" in name:
            values = 0.3 * noise
        else:
            values = 1.5 * noise / parameter.shape[1] ** 0.5
        parameter.data = values.to(torch.bfloat16).to(torch.float32)


def stored_config(model: torch.nn.Module, name: str) -> dict:
    """The `config.json` of this model."""
    config = json.loads(model.config.to_json_string(use_diff=True))
    config.update(architectures=[type(model).__name__], dtype="float32")
    if name in OLD_STYLE:
        parameters = config.pop("rope_parameters")
        config["torch_dtype"] = config.pop("dtype")
        config["rope_theta"] = parameters.pop("rope_theta")
        config["rope_scaling"] = parameters
    return config


@torch.no_grad()
def make(name: str, seed: int) -> dict[str, np.ndarray]:
    config_class, fields, prompt_length, max_model_len = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    config = config_class(**{**TINY, **fields}, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, generator)
    prompt = torch.randint(3, TINY["vocab_size"], (1, prompt_length), generator=generator)
    if name == "dynamic":
        # transformers keeps the frequencies of the longest sequence it has seen, until one is shorter than
        # max_position_embeddings: after this call they are those of max_model_len, as the engine fixes them.
        model(torch.randint(3, TINY["vocab_size"], (1, max_model_len), generator=generator))
    output = model(prompt, use_cache=True)
    logits = output.logits[0]
    continuation, margins = [], []
    for _ in range(0 if name == "dynamic_prompt" else CONTINUATION):
        best = torch.topk(output.logits[0, -1], 2)
        continuation.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        output = model(torch.tensor([continuation[-1:]]), cache=output.cache, use_cache=True)
    return {
        "config": np.array(json.dumps(stored_config(model, name))),
        "max_model_len": np.array(max_model_len or 0, np.int32),
        "prompt": prompt[0].numpy().astype(np.int32),
        "logits": logits.numpy(),
        "continuation": np.array(continuation, np.int32),
        "margins": np.array(margins, np.float32),
    } | {
        f"weights/{key}": value.numpy()
        for key, value in model.state_dict().items()
        if not (key == "lm_head.weight" and config.tie_word_embeddings)
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for index, model_name in enumerate(MODELS):
        # The first seed whose continuation has no near tie, so that the whole of it can be compared.
        candidates = (make(model_name, seed) for seed in range(1000 + 100 * index, 1100 + 100 * index))
        golden = next(golden for golden in candidates if golden["margins"].min(initial=1) > 2e-3)
        np.savez_compressed(FOLDER / f"{model_name}.npz", **golden)
        print(model_name, golden["logits"].std(), golden["margins"].min(initial=9), golden["continuation"][:12])
