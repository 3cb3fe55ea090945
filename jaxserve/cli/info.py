"""`jaxserve info`: what an engine with these options would be made of. No weights are loaded, nothing is compiled."""

import json
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from jaxserve.cli.options import add_shared_options, engine_config
from jaxserve.config import EngineConfig

OWN = ("json",)


def add_options(parser: ArgumentParser) -> None:
    add_shared_options(parser, sampling=False)
    parser.add_argument("--json", type=bool, default=False, help="print one JSON object")


def run(options: Namespace) -> int:
    found = describe(engine_config(options))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(f"{name + ':':<15} {value}" for name, value in found.items()))
    return 0


def describe(config: EngineConfig) -> dict[str, Any]:
    """The facts by name, as JSON knows them; raises what starting the engine would raise for these options."""
    import jax

    from jaxserve.startup import prepare

    prepared = prepare(config, None, None)
    model, layout, plan, max_len, attention, linear, deterministic, not_proven, buckets, _ = prepared
    size = model.config
    return {
        "devices": [f"{device.device_kind} ({device.platform}:{device.id})" for device in jax.local_devices()],
        "jax": jax.__version__,
        "model": str(config.model or "the demo model, SmolLM2-135M-Instruct"),
        "architecture": (
            f"{size.num_layers} layers, hidden {size.hidden_size}, {size.num_heads} heads ({size.num_kv_heads} of "
            f"keys and values) of {size.head_dim}, vocabulary {size.vocab_size}"
        ),
        "tokenizer": model.tokenizer is not None and str(model.tokenizer.folder),
        "dtype": str(model.dtype),
        "attention": attention.name,
        "linear": "xla" if linear is None else linear.name,
        "max_model_len": max_len,
        "memory": str(plan).removeprefix("memory: "),
        "bytes_per_page": layout.bytes_per_page,
        "token_buckets": list(buckets.tokens),
        "row_buckets": list(buckets.rows),
        "deterministic": _determinism(config, deterministic, not_proven),
        "compilation": f"{config.compile}, cache {config.compilation_cache() or 'off'}",
        "policy": config.scheduling_policy,
    }


def _determinism(config: EngineConfig, deterministic: bool, not_proven: str | None) -> str:
    if deterministic:
        return "true, if the test at start confirms it"
    return f"false: {not_proven}" if not_proven else "false, as asked"
