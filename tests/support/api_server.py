"""The real HTTP server and gateway in a thread, before an instance that says what the prompt tells it to."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx
from support.scripted_instance import TaskInstance
from support.tiny_models import CHAT_TEMPLATE, tiny_tokenizer

from kllm.cluster.gateway import Gateway
from kllm.config import ServerConfig
from kllm.messages import (
    Abort,
    CacheCleared,
    ClearCache,
    Deltas,
    Down,
    Drain,
    Drained,
    EngineLoad,
    Hello,
    SetRole,
    Submit,
    Up,
)
from kllm.request import Delta, Request, Timings, TokenLogprobs
from kllm.server.app import create_app
from kllm.server.http_server import HttpServer
from kllm.tokenization.tokenizer import Tokenizer
from kllm.transport.link import Link, LinkClosed
from kllm.transport.memory import memory_pair

T = TypeVar("T")

MODEL = "tiny"
DEFAULT_ANSWER = "Hello wörld 👋!"
HELLO = Hello(
    instance_id="i",
    incarnation="1",
    model=MODEL,
    max_model_len=512,
    vocab_size=288,
    num_blocks=64,
    block_tokens=16,
    max_num_seqs=64,
)
STEP_S = 0.001


def make_tokenizer() -> Tokenizer:
    backend = tiny_tokenizer()
    eos = backend.token_to_id("<|im_end|>")
    return Tokenizer(
        backend, bos_token_id=None, eos_token_ids=[eos], eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )


class TellingInstance:
    """Answers `say:TEXT` with TEXT, anything else with DEFAULT_ANSWER, at up to `per_step` tokens a step.

    `say:forever` never ends by itself; `say:fail` fails after two tokens; `say:refuse` is refused; `say:busy` is given
    back, as one that takes no more requests does.
    `aborts`, `submits` and `clears` are read by tests; while `paused` nothing is answered.
    """

    def __init__(self, link: Link[Down, Up], tokenizer: Tokenizer, per_step: int) -> None:
        self.link = link
        self.tokenizer = tokenizer
        self.per_step = per_step
        self.running: dict[str, tuple[Request, list[int], int]] = {}
        self.attempts: dict[str, int] = {}
        self.submits: list[Request] = []
        self.aborts: list[str] = []
        self.clears: list[bool] = []  # with the store, or not
        self.paused = False
        self.draining = False

    async def main(self) -> None:
        self.link.send(HELLO)
        inbox = asyncio.create_task(self._read())
        try:
            while not inbox.done() and not (self.draining and not self.running):
                await asyncio.sleep(STEP_S)
                items = [] if self.paused else [self._advance(request_id) for request_id in list(self.running)]
                if items:
                    self.link.send(Deltas(items=items))
                    self.link.send(EngineLoad(running=len(self.running), prefix_queries=10, prefix_hits=4))
            self.link.send(Drained())
        except LinkClosed:
            pass
        finally:
            inbox.cancel()
            await asyncio.gather(inbox, return_exceptions=True)
            self.link.close()

    async def _read(self) -> None:
        while True:
            match await self.link.recv():
                case Submit(request=request, attempt=attempt):
                    self.submits.append(request)
                    self.attempts[request.request_id] = attempt
                    self.running[request.request_id] = (request, self._answer(request), 0)
                case Abort(request_ids=ids):
                    for request_id in ids:
                        self.aborts.append(request_id)
                        self.running.pop(request_id, None)
                case Drain():
                    self.draining = True
                case SetRole(role=role, term=term):
                    self.link.send(EngineLoad(role=role, term=term, running=len(self.running)))
                case ClearCache(token=token, store=store):
                    self.clears.append(store)
                    self.link.send(CacheCleared(token=token, complete=not self.running))

    def told(self, request: Request) -> str:
        text = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        _, told, said = text.rpartition("say:")
        return said.split("<|im_end|>")[0] if told else DEFAULT_ANSWER

    def _answer(self, request: Request) -> list[int]:
        said = self.told(request)
        if said == "forever":
            return self.tokenizer.encode("again ") * 1000
        ids = self.tokenizer.encode(said, add_special_tokens=False)
        return ids if request.params.ignore_eos else [*ids, *self.tokenizer.eos_token_ids]

    def _advance(self, request_id: str) -> Delta:
        request, answer, done = self.running[request_id]
        params, said = request.params, self.told(request)
        fresh = done == 0
        if said == "busy":
            del self.running[request_id]
            return Delta(request_id=request_id, attempt=self.attempts[request_id], finish_reason="abort")
        if said == "refuse" or (said == "fail" and done >= 2):
            del self.running[request_id]
            return Delta(
                request_id=request_id, index=done, finish_reason="error", error="told to", invalid=said == "refuse"
            )
        limit = min(len(answer), params.max_tokens or len(answer))
        end = min(limit, done + self.per_step)
        tokens = answer[done:end]
        self.running[request_id] = (request, answer, end)
        reason = None
        if end == limit:
            reason = "stop" if answer[end - 1] in self.tokenizer.eos_token_ids else "length"
            del self.running[request_id]
        entries = [None, *(self._entry(token, params.prompt_logprobs) for token in request.prompt_token_ids[1:])]
        return Delta(
            request_id=request_id,
            index=done,
            token_ids=tokens,
            logprobs=None if params.logprobs is None else [self._entry(token, params.logprobs) for token in tokens],
            prompt_logprobs=entries if fresh and params.prompt_logprobs is not None else None,
            num_cached_tokens=3,
            finish_reason=reason,
            timings=Timings(0.01, 0.02) if fresh else None,
        )

    def _entry(self, token: int, count: int | None) -> TokenLogprobs:
        others = ((token, -0.5), ((token + 1) % 256, -1.5), ((token + 2) % 256, float("-inf")))
        return TokenLogprobs(token, -0.5, 1, others[: count or 0])


class _Launcher:
    def __init__(self, tokenizer: Tokenizer, per_step: int) -> None:
        self.tokenizer = tokenizer
        self.per_step = per_step
        self.script: TellingInstance | None = None

    async def launch(self) -> TaskInstance:
        near, far = memory_pair()
        self.script = TellingInstance(far, self.tokenizer, self.per_step)
        return TaskInstance(near, asyncio.ensure_future(self.script.main()))


class ApiServer:
    """A context manager: `url`, `client()`, the `instance` script, and `call` to run something on the server's loop."""

    def __init__(self, *, max_queue: int = 64, per_step: int = 2, start: bool = True, **config: Any) -> None:
        self.config = ServerConfig(port=0, max_queue=max_queue, **config)
        self.tokenizer = make_tokenizer()
        self._per_step = per_step
        self._start = start
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> ApiServer:
        self._thread.start()
        assert self._listening.wait(30), "the server did not start"
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._http.stop)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not stop"

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        launcher = _Launcher(self.tokenizer, self._per_step)
        self.gateway = Gateway([launcher], rng=random.Random(0), max_queue=self.config.max_queue)
        if self._start:
            await self.gateway.start()
        self.app = create_app(self.gateway, self.tokenizer, self.config, self.config.served_model_name or MODEL)
        self._http = HttpServer(self.app)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            serving = asyncio.create_task(self._http.serve([listener]))
            await self._http.listening.wait()
            if launcher.script is not None:
                self.instance = launcher.script
            self._listening.set()
            await serving
        await self.gateway.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait, at most 20 s, until the condition holds on the server's loop."""

        async def wait() -> None:
            async with asyncio.timeout(20):
                while not condition():  # noqa: ASYNC110 - the condition belongs to others
                    await asyncio.sleep(0)

        self.call(wait())

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, headers=headers)
