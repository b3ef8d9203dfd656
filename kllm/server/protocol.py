"""Request bodies of the HTTP API. Names and defaults are OpenAI's and, for the extra fields, vLLM's.

Types are strict ("5" is not a number), unknown fields are errors, and null means "not given". Ranges that the
engine defines are checked by SamplingParams.validate, so that they are written once.

Fields that clients send although they do not change the output are accepted and ignored (Ignored below). Fields
that would change it and are not supported are errors when they ask for anything but the default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kllm.request import MAX_LOGIT_BIAS

ID_PATTERN = r"^[A-Za-z0-9._:@/+=-]{1,128}$"
MAX_PROMPTS = 1024


def _few(bias: object) -> object:
    """Counted before the items are looked at: each that is wrong would be an error."""
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"it may name at most {MAX_LOGIT_BIAS} tokens")
    return bias


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
T = TypeVar("T")
# The first item that is wrong is told, and the only one looked for: a list of a million makes no million errors.
Items = Annotated[list[T], Field(fail_fast=True)]
LogitBias = Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS), BeforeValidator(_few)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send the usage in a last chunk without choices.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far in every chunk.")


class JsonSchema(Body):
    name: str | None = Field(None, max_length=256)
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="The JSON schema to follow.")
    strict: bool | None = Field(None, description="The schema is always enforced, whatever this says.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputsBody(Body):
    """Exactly one field is given."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema, or one as text.")
    regex: str | None = Field(None, max_length=65536)
    grammar: str | None = Field(None, description="A Lark grammar.")
    choice: Items[str] | None = Field(None, min_length=1, max_length=1024)
    json_object: bool | None = None


class SamplingFields(Body):
    """What both kinds of completion take. Ranges are those of kllm.request.SamplingParams."""

    model: str | None = Field(None, description="A name from /v1/models; the served model when left out.")
    n: int | None = Field(None, ge=1, le=128, description="Outputs per prompt. Choice j draws with seed + j.")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: Int64 | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop: str | Items[str] | None = None
    stop_token_ids: Items[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: LogitBias | None = Field(None, description="Bias per token id, -100 to 100.")
    allowed_token_ids: Items[TokenId] | None = None
    bad_words: Items[str] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20, description="Not together with stream.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="Only together with stream.")
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(None, description="Lower runs first.")
    request_id: str | None = Field(None, pattern=ID_PATTERN)
    cache_salt: str | None = Field(None, max_length=1024, description="Requests with other salts share no KV cache.")
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None


class Ignored(Body):
    """Accepted because clients and load tools send them; none changes what is generated."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    parallel_tool_calls: bool | None = None
    verbosity: str | None = None
    session_id: str | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = Field(None, description="Ignored, as the next two: replies of the API have them.")
    audio: None = None
    function_call: None = None


class FunctionDefinition(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class ChatTemplateFields(Body):
    """What the chat template is rendered with."""

    messages: Items[ChatMessage] = Field(min_length=1)
    tools: Items[Tool] | None = Field(None, description="Given to the chat template.")
    reasoning_effort: str | None = Field(None, description="Given to the chat template, if it knows the variable.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the chat template.")
    add_generation_prompt: bool | None = None


class ChatCompletionRequest(SamplingFields, ChatTemplateFields, Ignored):
    """tool_choice: with "auto" (and "none") the tools are shown to the model and its answer is returned as text."""

    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Only together with logprobs.")
    tool_choice: Literal["none", "auto"] | None = None
    modalities: Items[Literal["text"]] | None = None


class CompletionRequest(SamplingFields, Ignored):
    prompt: str | Items[TokenId] | Items[str] | Items[Items[TokenId]] = Field(
        description="Text or token ids, or a list of either: each gives n choices."
    )
    echo: bool | None = Field(None, description="Return the prompt before the output.")
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=128, description="Only as much as n.")
    suffix: Literal[""] | None = None


class TokenizeRequest(Body):
    """Either prompt or messages is given."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = Field(None, min_length=1)
    tools: Items[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Items[TokenId]


class RoleRequest(Body):
    instance: int = Field(ge=0, description="Index of the instance, as in /debug/fleet.")
    role: Literal["both", "prefill", "decode"]
