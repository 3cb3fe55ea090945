"""The OpenAPI description, made from the protocol's types. Knows no HTTP library."""

import json
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jaxserve.server.protocol import ErrorBody

_REFERENCE = "#/components/schemas/{model}"
_GENERATION_ERRORS = {
    "400": "A field is wrong or unknown",
    "401": "No valid API key",
    "404": "No such model",
    "408": "The body came too slowly",
    "413": "The body is too large",
    "415": "The body is not application/json",
    "429": "Too many requests wait; Retry-After says when to come again",
    "500": "The engine or this request has failed",
    "503": "The server is being started or stopped",
    "504": "The request took too long",
}


@runtime_checkable
class Described(Protocol):
    path: str
    summary: str
    takes: type[BaseModel] | None
    answers: type[BaseModel] | None


def description(endpoints: Iterable[Described]) -> str:
    """The document as JSON."""
    endpoints = list(endpoints)
    taken = [(endpoint.takes, "validation") for endpoint in endpoints if endpoint.takes]
    answered = [(endpoint.answers, "serialization") for endpoint in endpoints if endpoint.answers]
    names, schemas = models_json_schema([*taken, *answered, (ErrorBody, "serialization")], ref_template=_REFERENCE)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path", "")
        paths[path] = {"post" if endpoint.takes else "get": _operation(endpoint, names)}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": version("jaxserve")},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
    return json.dumps(document)


def _operation(endpoint: Described, names: dict) -> dict[str, Any]:
    success = {"text/plain": {"schema": {"type": "string"}}}
    if endpoint.answers is not None:
        success = {"application/json": {"schema": names[endpoint.answers, "serialization"]}}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": {}}
    errors = {"401": _GENERATION_ERRORS["401"], "503": _GENERATION_ERRORS["503"]}
    if endpoint.takes is not None:
        errors = _GENERATION_ERRORS
        body = {"schema": names[endpoint.takes, "validation"]}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
        if "stream" in endpoint.takes.model_fields:
            success["text/event-stream"] = {}  # OpenAPI 3.1 has no words for a stream of events
    if "{model" in endpoint.path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        errors = errors | {"404": _GENERATION_ERRORS["404"]}
    operation["responses"]["200"] = {"description": "The answer", "content": success}
    problem = {"application/json": {"schema": names[ErrorBody, "serialization"]}}
    if endpoint.path in ("/health", "/ready"):
        errors, problem = {"503": errors["503"]}, success
    for status, meaning in errors.items():
        operation["responses"][status] = {"description": meaning, "content": problem}
    return operation
