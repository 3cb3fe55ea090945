"""What the commands share: the options of engine and sampling, and how a model is loaded."""

import dataclasses
import gc
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.llm import LLM

# Errors are reported by `main`, in one line; an option must be spelled out.
STRICT = {"exit_on_error": False, "allow_abbrev": False}

ENGINE_NAMES = [f"engine.{field.name}" for field in dataclasses.fields(EngineConfig) if field.name != "mesh"]
SAMPLING_NAMES = [f"sampling.{field.name}" for field in dataclasses.fields(SamplingParams)]
_FULL_NAMES = {name.split(".")[1]: name for name in [*ENGINE_NAMES, *SAMPLING_NAMES]}
_AMBIGUOUS = {name.split(".")[1] for name in ENGINE_NAMES} & {name.split(".")[1] for name in SAMPLING_NAMES}


def spelled(argument: str, own: Collection[str]) -> str:
    """An option as the parser knows it: `--max-num-seqs=8` becomes `--engine.max_num_seqs=8`.

    Hyphens are known from other engines, and the group need not be said where only one has the name; `own` are the
    names that the command itself has.
    """
    option, equals, value = argument.partition("=")
    if not re.fullmatch(r"--[\w.-]+", option):  # a value, maybe a prompt that starts with two hyphens
        return argument
    name, dot, part = option[2:].replace("-", "_").partition(".")
    full = name if name in _AMBIGUOUS or name in own else _FULL_NAMES.get(name, name)
    return f"--{full}{dot}{part}{equals}{value}"


def add_shared_options(parser: ArgumentParser, *, sampling: bool = True, **defaults: Any) -> None:
    """The options that commands share; `defaults` by full name, a dot as two underscores."""
    parser.add_argument("--config", action="config", help="a YAML file with any of these options")
    parser.add_class_arguments(EngineConfig, "engine", skip={"mesh"})
    if sampling:
        parser.add_class_arguments(SamplingParams, "sampling")
    parser.set_defaults({name.replace("__", "."): value for name, value in defaults.items()})


def engine_config(options: Namespace) -> EngineConfig:
    return EngineConfig(**_named(options, "engine"))


def sampling_params(options: Namespace, model: SamplingParams | None = None) -> SamplingParams:
    """What the options say; what they leave open is as `model` says (`Engine.default_sampling_params`)."""
    values, plain = _named(options, "sampling"), SamplingParams()
    if model is not None:
        left_open = values.keys() - set(options.given_sampling)
        said = {name: getattr(model, name) for name in left_open}
        values |= {name: value for name, value in said.items() if value != getattr(plain, name)}
    return SamplingParams(**values)


def _named(options: Namespace, group: str) -> dict[str, Any]:
    if not isinstance(options[group], Namespace):  # the parser lets a bare value of a YAML file through
        raise ValueError(f"{group}={options[group]!r}: {group} must hold options by name")
    return options[group].as_dict()


def load(config: EngineConfig) -> "LLM":
    """The model, loaded without garbage collection: what start-up makes stays, and looking for more takes a second."""
    gc.disable()
    try:
        from jaxserve.llm import LLM

        return LLM(config=config)
    finally:
        gc.freeze()
        gc.enable()


def encoded(prompts: Iterable[str | list], engine: "Engine") -> list[list[int]]:
    """Token ids of texts and of chats."""
    if engine.tokenizer is None:
        raise ValueError("dataset: its prompts need a tokenizer, and this engine has none")
    from jaxserve.text.chat_template import ChatTemplate

    template = ChatTemplate(engine.tokenizer)
    return [
        engine.tokenizer.encode(prompt) if isinstance(prompt, str) else template.prompt(prompt)["prompt_token_ids"]
        for prompt in prompts
    ]
