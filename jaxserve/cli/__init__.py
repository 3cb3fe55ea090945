"""The command line, `jaxserve COMMAND`. Each command is a module here with `add_options(parser)`, `run(options)`
and `OWN`, the names of its options beside those of the dataclasses (by subcommand, where there are some). Every option
is a flag or stands in a YAML file.
"""

import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from importlib import import_module

from jsonargparse import ArgumentParser, Namespace

from jaxserve.cli.options import ENGINE_NAMES, SAMPLING_NAMES, STRICT, spelled
from jaxserve.validation import nearest_name

COMMANDS = {
    "generate": "answer prompts, streaming",
    "chat": "talk with the model",
    "serve": "answer HTTP requests as OpenAI's API does",
    "convert": "write a model in another dtype or format",
    "info": "what an engine with these options is made of, without loading the model",
    "eval": "run an evaluation job, or compare two",
    "batch": "answer a file of requests in OpenAI's batch format",
    "bench": "measure the engine",
    "train-draft": "train a draft head for a model on what the model itself says",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status. Errors that a user can cause are one line on stderr."""
    given = sys.argv[1:] if arguments is None else arguments
    own = _own(given)
    given = [spelled(argument, own) for argument in given]
    parser = ArgumentParser(prog="jaxserve", description="An exact LLM inference engine for JAX.", **STRICT)
    commands = parser.add_subcommands(required=True, dest="command")
    for name, description in COMMANDS.items():
        command = ArgumentParser(description=description, **STRICT)
        commands.add_subcommand(name, command, help=description)
        if name in given:  # the options of a command take 40 ms to build
            _module(name).add_options(command)
    try:
        options = parser.parse_args(given)
        explicit = parser.parse_args(given, defaults=False)[options.command].get("sampling")
    except ArgumentError as error:
        print(f"jaxserve: {_one_line(str(error), given)}", file=sys.stderr)
        return 2
    options[options.command].given_sampling = tuple(explicit.as_dict()) if isinstance(explicit, Namespace) else ()
    try:
        return _module(options.command).run(options[options.command])
    except KeyboardInterrupt:
        return 130  # as shells count it
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        if os.environ.get("JAXSERVE_TRACEBACK"):
            raise
        print(f"jaxserve: {error}", file=sys.stderr)
        return 1


def _module(command: str):
    return import_module(f"jaxserve.cli.{command.replace('-', '_')}")


def _own(given: list[str]) -> Sequence[str]:
    """The names of the command's own options; a command with subcommands has them for each."""
    own = next((_module(argument).OWN for argument in given if argument in COMMANDS), ())
    return next((own[argument] for argument in given if argument in own), ()) if isinstance(own, dict) else own


def _one_line(message: str, given: list[str]) -> str:
    """The parser's message, with the nearest right name for an unknown one."""
    unknown = re.search(r"(?:unrecognized arguments: --|does not accept option ')([\w.]+)", message)
    own = _own(given)
    nearest = nearest_name(unknown[1], [*ENGINE_NAMES, *SAMPLING_NAMES, *own, "config"]) if unknown else None
    return " ".join(message.split()) + (f" (did you mean {nearest!r}?)" if nearest else "")
