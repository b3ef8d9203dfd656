"""The HTTP API: routes and what each may answer. OpenAI's, with vLLM's extensions.

Open without an API key: /health, /ready, /version, /metrics, /openapi.json. Everything else needs one if keys are set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Security
from fastapi.responses import Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

import kllm
from kllm.cluster.gateway import Gateway
from kllm.config import ServerConfig
from kllm.request import InvalidRequest
from kllm.server import openapi
from kllm.server.bodies import Model, read_body
from kllm.server.cache import cache_routes
from kllm.server.chat import ChatFormat, chat_job
from kllm.server.completions import CompletionFormat, completion_job
from kllm.server.debug import debug_routes
from kllm.server.direct import DirectCalls, endpoints
from kllm.server.errors import ApiError, json_response, unavailable
from kllm.server.fleet import fleet_routes
from kllm.server.generation import generate
from kllm.server.jobs import Caller
from kllm.server.keys import KeyCheck, key_check, operator_check
from kllm.server.middleware import RequestLog
from kllm.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kllm.server.reply import Job, ReplyFormat, streamed_reply, whole_reply
from kllm.server.responses import (
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    StatusResponse,
    TokenizeResponse,
    VersionResponse,
)
from kllm.server.service import Service
from kllm.server.slo import slo_routes
from kllm.telemetry.metrics import CONTENT_TYPE
from kllm.tokenization.chat_template import ChatTemplate
from kllm.tokenization.tokenizer import Tokenizer

GENERATION_ERRORS = openapi.errors(400, 401, 404, 413, 415, 429, 500, 503)


def create_app(
    gateway: Gateway,
    tokenizer: Tokenizer,
    config: ServerConfig,
    model_name: str | Sequence[str],
    chat_template: ChatTemplate | None = None,
    root: str = "",
) -> FastAPI:
    """The ASGI application. It does not start or stop the gateway.

    model_name: what clients call the model, or several such names. chat_template: the tokenizer's own by default.
    root: the model's origin, told in its card. `app.state.service.draining = True` refuses new requests.
    """
    names = [model_name] if isinstance(model_name, str) else list(model_name)
    template = chat_template or ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    service = Service(gateway, tokenizer, config, names, template, root or names[0])
    app = FastAPI(
        title="kLLM",
        version=kllm.__version__,
        description="OpenAI-compatible inference server. Errors have the form of ErrorResponse.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    check = key_check(config)
    dependencies, operators = _secured(check), _secured(operator_check(config))
    generation = _generation_routes(service)
    app.include_router(generation, dependencies=dependencies)
    for routes in (_model_routes, _token_routes):
        app.include_router(routes(service), dependencies=dependencies)
    for administration in (cache_routes, fleet_routes, debug_routes, slo_routes):
        app.include_router(administration(service), dependencies=operators)
    app.include_router(_open_routes(service))
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_middleware(DirectCalls, endpoints=endpoints(generation), check=check)
    app.add_middleware(RequestLog)
    app.openapi = lambda: openapi.describe(app)  # type: ignore[method-assign]
    return app


def _secured(check: KeyCheck | None) -> list[Any]:
    """Dependencies of routes."""
    return [] if check is None else [Security(HTTPBearer(auto_error=False)), Depends(check)]


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    messages = {
        404: f"Unknown path: {request.url.path[:200]}.",
        405: f"The method {request.method} is not allowed for {request.url.path[:200]}.",
    }
    told = ApiError(error.status_code, messages.get(error.status_code, str(error.detail)))
    response = told.response()
    response.headers.update(error.headers or {})
    return response


def _open_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/health", response_model=StatusResponse, responses=openapi.errors(503), summary="Is the process alive?"
    )
    async def health() -> Response:
        if not service.gateway.healthy:
            raise unavailable("The model's instance keeps failing.", None, "unhealthy")
        return json_response({"status": "ok"})

    @router.get("/ready", response_model=StatusResponse, responses=openapi.errors(503), summary="Are requests taken?")
    async def ready() -> Response:
        if not service.ready:
            service.require_ready()
            raise unavailable("The model is being restarted.", code="not_ready")
        return json_response({"status": "ready"})

    @router.get("/version", response_model=VersionResponse)
    async def version() -> Response:
        return json_response({"version": kllm.__version__})

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    return router


def _model_routes(service: Service) -> APIRouter:
    router = APIRouter()

    def card(name: str, max_model_len: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "kllm",
            "root": service.root,
            "parent": None,
            "max_model_len": max_model_len,
            "permission": [],
        }

    @router.get("/v1/models", response_model=ModelList, responses=openapi.errors(401, 503))
    async def models() -> Response:
        info = service.require_ready()
        data = [card(name, info.max_model_len) for name in service.model_names]
        return json_response({"object": "list", "data": data})

    @router.get("/v1/models/{model:path}", response_model=ModelCard, responses=openapi.errors(401, 404, 503))
    async def model(model: str) -> Response:
        info = service.require_ready()
        return json_response(card(service.require_model(model), info.max_model_len))

    @router.get("/load", response_model=LoadResponse, responses=openapi.errors(401))
    async def load() -> Response:
        gateway, now = service.gateway, service.gateway.load
        return json_response(
            {
                "server_load": gateway.in_flight,
                "running": now.running,
                "waiting": now.waiting,
                "kv_cache_usage": now.kv_usage,
                "kv_cache_cached": now.kv_cached,
                "restarts": gateway.restarts,
            }
        )

    return router


def _token_routes(service: Service) -> APIRouter:
    router = APIRouter()
    errors = openapi.errors(400, 401, 404, 413, 415, 500, 503)

    @router.post(
        "/tokenize",
        response_model=TokenizeResponse,
        responses=errors,
        openapi_extra=openapi.takes(TokenizeRequest),
    )
    async def tokenize(request: Request) -> Response:
        body = await _read(service, request, TokenizeRequest)
        service.require_model(body.model)
        info = service.require_ready()
        tokens = await _tokens(service, body)
        strings = [service.tokenizer.token_str(token) for token in tokens] if body.return_token_strs else None
        return json_response(
            {"count": len(tokens), "max_model_len": info.max_model_len, "tokens": tokens, "token_strs": strings}
        )

    @router.post(
        "/detokenize",
        response_model=DetokenizeResponse,
        responses=errors,
        openapi_extra=openapi.takes(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        body = await _read(service, request, DetokenizeRequest)
        service.require_model(body.model)
        info = service.require_ready()
        if any(token >= info.vocab_size for token in body.tokens):
            raise InvalidRequest(f"token ids must be below {info.vocab_size}", "tokens")
        text = await service.workers.run(len(body.tokens), service.tokenizer.decode, body.tokens, False)
        return json_response({"prompt": text})

    return router


async def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", "prompt")
    if body.messages is None:
        return await service.encode(body.prompt or "", body.add_special_tokens is not False)
    opening = body.add_generation_prompt is not False
    text = await service.render_chat(body.messages, body.tools, opening, body.chat_template_kwargs or {})
    return await service.encode(text, bool(body.add_special_tokens))


def _generation_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletionResponse,
        responses={**GENERATION_ERRORS, **openapi.streams(ChatCompletionResponse, ChatCompletionChunk)},
        openapi_extra=openapi.takes(ChatCompletionRequest),
    )
    async def chat_completions(request: Request) -> Response:
        arrival = asyncio.get_running_loop().time()
        body = await _read(service, request, ChatCompletionRequest)
        job = await chat_job(service, body, Caller.of(request))
        return await _reply(service, request, job, ChatFormat(service, body, job), bool(body.stream), arrival)

    @router.post(
        "/v1/completions",
        response_model=CompletionResponse,
        responses={**GENERATION_ERRORS, **openapi.streams(CompletionResponse, CompletionResponse)},
        openapi_extra=openapi.takes(CompletionRequest),
    )
    async def completions(request: Request) -> Response:
        arrival = asyncio.get_running_loop().time()
        body = await _read(service, request, CompletionRequest)
        job = await completion_job(service, body, Caller.of(request))
        return await _reply(service, request, job, CompletionFormat(service, body, job), bool(body.stream), arrival)

    return router


async def _read(service: Service, request: Request, model: type[Model]) -> Model:
    return await read_body(request, model, service.config.max_body_bytes, service.workers)


async def _reply(
    service: Service, request: Request, job: Job, form: ReplyFormat, stream: bool, arrival: float
) -> Response:
    pieces = generate(service.gateway, service.tokenizer, service.metrics, job.requests, arrival)
    send: Callable[..., Any] = streamed_reply if stream else whole_reply
    response: Response = await send(request, job, form, pieces)
    return response
