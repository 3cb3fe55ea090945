"""The ASGI application: routes, and how the engine's life hangs on the application's."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve import metrics
from jaxserve.server import handlers, openapi, web_page
from jaxserve.server.embeddings import EmbeddingAnswer, EmbeddingRequest
from jaxserve.server.endpoint import BUG, Handler, Post, error_response
from jaxserve.server.errors import ApiError
from jaxserve.server.middleware import ApiKeys, RequestIds
from jaxserve.server.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    StateAnswer,
    TokenizeAnswer,
    TokenizeRequest,
    VersionAnswer,
)
from jaxserve.server.responses import ResponseAnswer, ResponsesRequest
from jaxserve.server.service import Service

Get = Callable[[Service, Request], Awaitable[Response]]


class Endpoint(NamedTuple):
    """One route: what it takes (None: nothing), what it answers, and who does it."""

    path: str
    summary: str
    takes: type[BaseModel] | None
    answers: type[BaseModel] | None
    handler: Handler | Get


async def _health(service: Service, request: Request) -> Response:
    failed = service.status == "failed"
    state = StateAnswer(status=service.status if failed else "ok", error=service.error)
    return _json(state, 503 if failed else 200)


async def _ready(service: Service, request: Request) -> Response:
    ready = service.status == "ready"
    done, total = service.compiled if service.starting and service.compiled else (None, None)
    state = StateAnswer(status=service.status, done=done, total=total, error=service.error)
    return _json(state, 200 if ready else 503)


async def _version(service: Service, request: Request) -> Response:
    from importlib.metadata import version

    return _json(VersionAnswer(version=version("jaxserve")))


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(id=name, created=service.created, max_model_len=service.max_model_len)


async def _models(service: Service, request: Request) -> Response:
    return _json(ModelList(data=[_card(service, name) for name in service.names]))


async def _model(service: Service, request: Request) -> Response:
    return _json(_card(service, service.check_model(request.path_params["model"])))


async def _metrics(service: Service, request: Request) -> Response:
    return Response(await service.metrics(), media_type=metrics.CONTENT_TYPE)


def _json(answer: BaseModel, status: int = 200) -> Response:
    return Response(answer.model_dump_json(), status, media_type="application/json")


ENDPOINTS = (
    Endpoint("/v1/completions", "Continue texts", CompletionRequest, Completion, handlers.complete),
    Endpoint("/v1/chat/completions", "Answer in a chat", ChatCompletionRequest, ChatCompletion, handlers.complete),
    Endpoint("/v1/responses", "Answer in a conversation", ResponsesRequest, ResponseAnswer, handlers.respond),
    Endpoint("/v1/embeddings", "Texts as vectors", EmbeddingRequest, EmbeddingAnswer, handlers.embed),
    Endpoint("/v1/models", "The model's names", None, ModelList, _models),
    Endpoint("/v1/models/{model:path}", "The model by one of its names", None, ModelCard, _model),
    Endpoint("/tokenize", "A text or a chat as tokens", TokenizeRequest, TokenizeAnswer, handlers.tokenize),
    Endpoint("/detokenize", "Tokens as a text", DetokenizeRequest, DetokenizeAnswer, handlers.detokenize),
    Endpoint("/health", "Whether the server lives: 503 when its engine has failed", None, StateAnswer, _health),
    Endpoint("/ready", "Whether it answers requests: 503 while it is being started", None, StateAnswer, _ready),
    Endpoint("/version", "The program's version", None, VersionAnswer, _version),
    Endpoint("/metrics", "Figures for Prometheus", None, None, _metrics),
)


def create_app(service: Service) -> Starlette:
    """The application; its lifespan starts the engine and ends it."""
    description = openapi.description(ENDPOINTS)

    async def describe(request: Request) -> Response:
        return Response(description, media_type="application/json")

    routes = [_route(service, endpoint) for endpoint in ENDPOINTS]
    middleware = [Middleware(RequestIds), Middleware(ApiKeys, keys=service.config.api_key)]
    if service.config.allowed_origins:
        cors = {"allow_origins": service.config.allowed_origins, "allow_methods": ["*"], "allow_headers": ["*"]}
        middleware.insert(0, Middleware(CORSMiddleware, **cors))
    return Starlette(
        routes=[*routes, Route("/openapi.json", describe), *web_page.routes()],
        middleware=middleware,
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _bug},
        lifespan=lambda app: _lifespan(service),
    )


def _route(service: Service, endpoint: Endpoint) -> Route:
    if endpoint.takes is not None:
        return Route(endpoint.path, Post(service, endpoint.takes, endpoint.handler), methods=["POST"])

    async def get(request: Request) -> Response:
        return await endpoint.handler(service, request)

    return Route(endpoint.path, get, methods=["GET"])


@asynccontextmanager
async def _lifespan(service: Service) -> AsyncIterator[None]:
    running = asyncio.create_task(service.run())
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await service.close()


async def _http_error(request: Request, error: HTTPException) -> Response:
    return error_response(ApiError(error.status_code, error.detail, headers=dict(error.headers or {})))


async def _api_error(request: Request, error: ApiError) -> Response:
    return error_response(error)


async def _bug(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, BUG))
