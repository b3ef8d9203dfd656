"""Response bodies of the HTTP API. They describe /openapi.json; replies are built from plain dicts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorObject(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Reply):
    error: ErrorObject


class PromptTokensDetails(Reply):
    cached_tokens: int


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[ChatTokenLogprob]


class PromptLogprob(Reply):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class AssistantMessage(Reply):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Reply):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletionResponse(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(Reply):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Reply):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Reply):
    """One server-sent event; the stream ends with `data: [DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(Reply):
    """Also the shape of one server-sent event when streaming, where usage may be missing."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: Usage | None = None


class ModelCard(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[dict[str, Any]]


class ModelList(Reply):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(Reply):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(Reply):
    prompt: str


class StatusResponse(Reply):
    status: str


class VersionResponse(Reply):
    version: str


class ClearedInstance(Reply):
    instance: int
    complete: bool = Field(description="Nothing that this instance had cached is left.")
    error: str | None = Field(description="Why something is left; null where requests still use it.")


class CacheClearedResponse(Reply):
    complete: bool = Field(description="That of all instances.")
    instances: list[ClearedInstance]


class LoadResponse(Reply):
    server_load: int = Field(description="Requests accepted and not yet ended.")
    running: int
    waiting: int
    kv_cache_usage: float
    kv_cache_cached: float
    restarts: int


class FleetInstance(Reply):
    """One instance as the gateway sees it. load: its latest report."""

    index: int
    address: str | None = Field(description="Where it was started; none if that was here.")
    state: Literal["starting", "absent", "ready", "quiet", "resting", "avoided", "leaving", "left", "given up"]
    trouble: str | None = Field(description="Why there is none.")
    instance_id: str | None
    incarnation: str | None = Field(description="New for every start of its process.")
    model: str | None
    role: Literal["both", "prefill", "decode"]
    term: int = Field(description="Of its role: the latest holds.")
    requests: int = Field(description="Of this gateway, there now.")
    restarts: int
    silent_s: float | None = Field(description="Seconds since its last message.")
    load: dict[str, Any]


class FleetResponse(Reply):
    instances: list[FleetInstance]


class RoleResponse(Reply):
    instance: int
    role: Literal["both", "prefill", "decode"]
    done: bool = Field(description="It has the role. Otherwise it gets it when it is there.")
