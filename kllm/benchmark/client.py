"""One streamed request to an OpenAI-compatible server, with the moment of every chunk."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx

from kllm.workload.sample import Sample


@dataclass
class RequestRecord:
    """What happened to one request. Times are seconds since the start of the run.

    chunk_s: when each chunk with output came. output_tokens: as the server says; one a chunk if it does not.
    error: None, or the kind of failure ("http 429", "timeout", …); detail: what the server said about it.
    """

    index: int
    prompt_tokens: int
    scheduled_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first output."""
        return self.chunk_s[0] - self.sent_s if self.chunk_s else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks. A server that puts several tokens into a chunk has fewer and longer gaps."""
        return [later - earlier for earlier, later in zip(self.chunk_s, self.chunk_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for outputs of one token."""
        if self.output_tokens < 2 or not self.chunk_s:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.output_tokens - 1)


class StreamError(Exception):
    """The stream ended wrongly; the first argument is the kind of error, the second the detail."""


class CompletionClient:
    """Sends samples as token ids to /v1/completions of one server."""

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str | None,
        timeout_s: float,
        options: dict[str, Any],
        prompt_of: Callable[[Sample], list[int]],
    ) -> None:
        """options: further fields of every request body, such as temperature. prompt_of: a sample's token ids."""
        self._model = model
        self._prompt_of = prompt_of
        self._options = options
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, sample: Sample, record: RequestRecord, run_start: float) -> None:
        """Run one request and fill its record. Never raises for what the server or the network does."""
        prompt = self._prompt_of(sample)
        record.sent_s = perf_counter() - run_start
        try:
            await self._stream(prompt, sample.output_len, record, run_start)
        except StreamError as error:
            record.error, record.detail = error.args
        except httpx.TimeoutException as error:
            record.error, record.detail = "timeout", type(error).__name__
        except httpx.TransportError as error:
            record.error, record.detail = "connection", f"{type(error).__name__}: {error}"
        record.end_s = perf_counter() - run_start

    async def _stream(self, prompt: list[int], output_len: int, record: RequestRecord, run_start: float) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_len,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise StreamError(f"http {response.status_code}", text[:500])
            done = False
            async for data in sse_events(response.aiter_bytes()):
                now = perf_counter() - run_start
                if data == b"[DONE]":
                    done = True
                    break
                _note_chunk(data, record, now)
        if not done:
            raise StreamError("stream cut off", "the stream ended without [DONE]")
        if not record.output_tokens:  # a server that sends no usage
            record.output_tokens = len(record.chunk_s)


async def sse_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The `data:` payloads of a server-sent event stream, whatever the borders of the network chunks."""
    pending = b""
    async for chunk in chunks:
        pending = (pending + chunk).replace(b"\r\n", b"\n")
        *events, pending = pending.split(b"\n\n")
        for event in events:
            lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


def _note_chunk(data: bytes, record: RequestRecord, now: float) -> None:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise StreamError("bad chunk", data[:200].decode(errors="replace")) from error
    if "error" in chunk:
        raise StreamError("error in stream", str(chunk["error"])[:500])
    if usage := chunk.get("usage"):
        record.output_tokens = usage["completion_tokens"]
        record.prompt_tokens = usage["prompt_tokens"]
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in chunk.get("choices", ()):
        # A closing chunk that only says why the output ended is not output, unless the output had no text at all.
        if choice.get("text") or choice.get("finish_reason") is None or not record.chunk_s:
            record.chunk_s.append(now)


async def first_model(url: str, api_key: str | None, timeout_s: float = 30.0) -> dict[str, Any]:
    """The card of the first model that the server lists. Raises ConnectionError with a message for people."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, timeout=timeout_s) as http:
            response = await http.get("/v1/models")
            response.raise_for_status()
            card: dict[str, Any] = response.json()["data"][0]
            return card
    except httpx.HTTPStatusError as error:
        raise ConnectionError(f"{url}/v1/models answered {error.response.status_code}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConnectionError(f"no server answers at {url}: {error or type(error).__name__}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConnectionError(f"{url}/v1/models does not list a model") from error
