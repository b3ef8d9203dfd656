"""An engine's HTTP API, as far as a gateway needs it: is it there, what does it serve, how loaded is it, complete this.

Every answer has a limit on its size. Redirects are not followed, and proxies of the environment are not used: requests
go where the operator said. The API key is in the headers of the client and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from kllm.cluster.external.config import ExternalEngine
from kllm.cluster.external.engine_metrics import EngineMetrics, parse_metrics
from kllm.cluster.external.errors import EngineBusy, EngineFault, EngineUnavailable, EngineUnusable
from kllm.cluster.external.event_stream import EventTooLarge, sse_events
from kllm.request import InvalidRequest

MAX_ANSWER_BYTES = 8 * 2**20
MAX_EVENT_BYTES = 16 * 2**20  # the first one of a completion may repeat the prompt's token ids
MAX_MESSAGE = 500  # characters of an error's text that are passed on
CONNECT_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 5.0  # for everything but completions
COMPLETIONS = "/v1/completions"


class ModelCard(msgspec.Struct, frozen=True):
    """Of /v1/models. max_model_len: 0 where it is not said."""

    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


class _Version(msgspec.Struct):
    version: str = ""


class _Cleared(msgspec.Struct):
    """success is vLLM's word, complete is ours."""

    success: bool = True
    complete: bool = True


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: Mapping[str, str]


class HttpEngine:
    """Raises EngineUnavailable, EngineUnusable, EngineBusy, EngineFault as said below, and nothing of httpx's.

    api_key: sent with every request, if there is one."""

    def __init__(self, config: ExternalEngine, api_key: str | None) -> None:
        self.url = config.url
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._http = httpx.AsyncClient(
            base_url=config.url,
            headers=headers,
            timeout=httpx.Timeout(ASK_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=config.max_requests),
            verify=config.url.startswith("https:"),  # loading certificates takes a while, and http needs none
            trust_env=False,
        )
        self._read_timeout_s = config.read_timeout
        self._health_path = "/health"

    async def close(self) -> None:
        await self._http.aclose()

    # -- what it is ------------------------------------------------------------------------------------------

    async def card(self, wanted: str | None) -> ModelCard:
        """Of the model of that name, or of the first. Raises EngineUnavailable, EngineUnusable."""
        answer = await self._asked_well("/v1/models")
        try:
            cards = msgspec.json.decode(answer.body, type=_ModelList).data
        except msgspec.DecodeError as error:
            raise EngineUnusable(f"{self.url}/v1/models does not list models: {error}") from error
        if not cards:
            raise EngineUnusable(f"{self.url}/v1/models lists no model")
        if wanted is None:
            return cards[0]
        for card in cards:
            if card.id == wanted:
                return card
        names = ", ".join(card.id[:100] for card in cards[:10])
        raise EngineUnusable(f"{self.url} does not serve a model {wanted!r}; it serves {names}")

    async def version(self) -> str:
        """ "" where it does not say. Raises EngineUnavailable."""
        answer = await self._ask("GET", "/version")
        try:
            return msgspec.json.decode(answer.body, type=_Version).version[:40] if answer.status == 200 else ""
        except msgspec.DecodeError:
            return ""

    async def metrics(self) -> EngineMetrics | None:
        """None where it has none that we know. Raises EngineUnavailable."""
        answer = await self._ask("GET", "/metrics")
        return parse_metrics(answer.body.decode(errors="replace")) if answer.status == 200 else None

    async def check_health(self) -> None:
        """Raises EngineUnavailable."""
        answer = await self._ask("GET", self._health_path)
        if answer.status == 404 and self._health_path == "/health":
            self._health_path = "/v1/models"
            answer = await self._ask("GET", self._health_path)
        if answer.status != 200:
            raise EngineUnavailable(f"{self.url}{self._health_path} answers {answer.status}", certain=True)

    async def _asked_well(self, path: str) -> Answer:
        """Raises EngineUnavailable for a server that may be starting, EngineUnusable for one that is something else."""
        answer = await self._ask("GET", path)
        if answer.status == 200:
            return answer
        said = f"{self.url}{path} answers {answer.status}: {error_message(answer.body)}"
        if answer.status in (401, 403):
            raise EngineUnusable(f"{said} (api_key_env names the environment variable with the API key)")
        if answer.status >= 500 or answer.status == 429:
            raise EngineUnavailable(said)
        raise EngineUnusable(f"{said}; is it an OpenAI-compatible server?")

    async def clear_cache(self, store: bool) -> bool:
        """False: running requests still use some of it. Raises EngineUnavailable, EngineUnusable if it cannot do so."""
        path = "/reset_prefix_cache"
        answer = await self._ask("POST", f"{path}?reset_external=true" if store else path)
        if answer.status != 200:
            raise EngineUnusable(f"{self.url}{path} answers {answer.status}: {error_message(answer.body)}")
        try:
            said = msgspec.json.decode(answer.body, type=_Cleared) if answer.body else _Cleared()
        except msgspec.DecodeError as error:
            raise EngineUnusable(f"{self.url}{path} does not say what came of it: {error}") from error
        return said.success and said.complete

    async def _ask(self, method: str, path: str) -> Answer:
        try:
            async with self._http.stream(method, path) as response:
                return await _read(response)
        except httpx.ConnectError as error:
            raise EngineUnavailable(f"nobody answers at {self.url}: {error}", certain=True) from error
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{self.url}{path}: {str(error) or type(error).__name__}") from error

    # -- completions -----------------------------------------------------------------------------------------

    async def complete(self, body: bytes, request_id: str) -> AsyncGenerator[bytes, None]:
        """The JSON of every event of a streamed completion. Close the generator to make the engine stop.

        Raises InvalidRequest if the engine finds the request wrong, EngineBusy, or EngineFault, the latter also after
        some events. An end without [DONE] is a fault."""
        timeout = httpx.Timeout(self._read_timeout_s, connect=CONNECT_TIMEOUT_S, pool=None)
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        try:
            async with self._http.stream(
                "POST", COMPLETIONS, content=body, headers=headers, timeout=timeout
            ) as response:
                if response.status_code != 200:
                    raise _refusal(await _read(response))
                async for data in sse_events(response.aiter_raw(), MAX_EVENT_BYTES):
                    if data == b"[DONE]":
                        return
                    yield data
        except httpx.ReadTimeout as error:
            raise EngineFault(f"the engine sent nothing for {self._read_timeout_s:g} s") from error
        except (httpx.HTTPError, EventTooLarge) as error:
            raise EngineFault(f"the answer broke off: {str(error) or type(error).__name__}") from error
        raise EngineFault("the answer ended before it was complete")


async def _read(response: httpx.Response) -> Answer:
    """The whole body; cut off where it is too long."""
    body = bytearray()
    chunks: AsyncIterator[bytes] = response.aiter_raw()
    async for chunk in chunks:
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            break
    return Answer(response.status_code, bytes(body[:MAX_ANSWER_BYTES]), response.headers)


def _refusal(answer: Answer) -> Exception:
    """The exception for a completion that is refused with this answer."""
    said = f"the engine answers {answer.status}: {error_message(answer.body)}"
    if answer.status in (429, 503):
        return EngineBusy(said, _seconds(answer.headers.get("retry-after", "")))
    if answer.status in (400, 413, 422):
        return InvalidRequest(error_message(answer.body))
    return EngineFault(said, status=answer.status)


def _seconds(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0.0


def error_message(body: bytes) -> str:
    """What an error's body says, for people: OpenAI's error.message, FastAPI's detail, or the text as it is."""
    try:
        return message_of(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return " ".join(body[: 4 * MAX_MESSAGE].decode(errors="replace").split())[:MAX_MESSAGE] or "(no text)"


def message_of(value: Any) -> str:
    """The same of a body that is decoded already."""
    if isinstance(value, dict):
        for key in ("error", "message", "detail"):
            if value.get(key):
                return message_of(value[key])
    return " ".join(str(value).split())[:MAX_MESSAGE]
