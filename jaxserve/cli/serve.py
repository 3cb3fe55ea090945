"""`jaxserve serve`: OpenAI's HTTP API over one engine."""

import dataclasses

from jsonargparse import ArgumentParser, Namespace

from jaxserve.cli.options import add_shared_options, engine_config
from jaxserve.server.config import ServerConfig

OWN = tuple(field.name for field in dataclasses.fields(ServerConfig))


def add_options(parser: ArgumentParser) -> None:
    add_shared_options(parser, sampling=False, engine__compile="warmup")
    parser.add_class_arguments(ServerConfig, None)


def run(options: Namespace) -> int:
    server = ServerConfig(**{name: options[name] for name in OWN})
    engine = engine_config(options)
    from jaxserve.server import logs  # what follows imports the web, and takes a moment
    from jaxserve.server.run import serve
    from jaxserve.server.service import Service

    logs.configure(server.log_format)
    return serve(Service(server, engine))
