"""kill -9 of the instance process under running streams: they pause, go on, and say what they would have said.

Operators that compute the same bits in any batch make this exact: text, tokens, log-probabilities and usage of a
disturbed run equal those of an undisturbed one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.live_server import CHAT, TEXT, EventReader, LiveServer, Output, wait_until

LONG = 200  # tokens: a stream is far from its end when its first tokens have been read
FLAGS = ("--threads", "1", "--dtype", "float32", "--kernels", "invariant", "--num-kv-blocks", "600")
READ = 12  # tokens read before the instance dies; more than the gateway wants to see to call an attempt progress


@pytest.fixture(scope="module")
def server(live_model: Path) -> Iterator[LiveServer]:
    with LiveServer(live_model, *FLAGS) as running:
        yield running
        assert "Traceback" not in running.log


def completion(prompt: str, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": LONG, "ignore_eos": True, "return_token_ids": True, **more}
    return TEXT, body


def chat(prompt: str, **more: Any) -> tuple[str, dict[str, Any]]:
    _, body = completion("", **more)
    del body["prompt"]
    return CHAT, {**body, "messages": [{"role": "user", "content": prompt}]}


NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 100, "maximum": 999},
    "minItems": 50,
    "maxItems": 80,
}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": completion("the end of the line", temperature=0),
    "seeded": completion("the end of the line", temperature=1.0, seed=5),
    "filtered": completion("and then", seed=6, top_p=0.9, top_k=50, min_p=0.01, temperature=1.3),
    "penalties": completion(
        "on and on", seed=7, presence_penalty=0.7, frequency_penalty=0.5, repetition_penalty=1.2, bad_words=["the"]
    ),
    "logprobs": completion("how sure", seed=8, logprobs=3),
    "chat with logprobs": chat("how sure", seed=9, logprobs=True, top_logprobs=2),
    "several outputs": completion("all of them", seed=10, n=3),
    "regex": completion("ids: ", seed=11, structured_outputs={"regex": "([a-z]{2}[0-9]{2};){40,50}"}, ignore_eos=False),
    "schema": chat(
        "numbers", seed=12, ignore_eos=False, max_tokens=1000,
        response_format={"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS}},
    ),
}  # fmt: skip


def said(outputs: dict[int, Output]) -> dict[int, Output]:
    """Outputs without what may differ: how much of the prompt was found in the cache."""
    plain = {}
    for index, output in sorted(outputs.items()):
        usage = {key: value for key, value in (output.usage or {}).items() if key != "prompt_tokens_details"}
        plain[index] = replace(output, usage=usage)
    return plain


@pytest.fixture(scope="module")
def expected(server: LiveServer) -> dict[str, dict[int, Output]]:
    """What the requests say when each runs alone and nothing happens."""
    return {name: run(server, *request) for name, request in REQUESTS.items()}


def run(server: LiveServer, path: str, body: dict[str, Any]) -> dict[int, Output]:
    with server.stream(path, body) as reader:
        reader.read_all()
    return said(reader.outputs)


def restarts(server: LiveServer) -> float:
    return server.metrics()["kllm:instance_restarts_total"]


def last_death(server: LiveServer) -> str:
    return [line for line in server.log.splitlines() if "the instance ended with" in line][-1]


@pytest.mark.parametrize("name", ["greedy", "seeded", "chat with logprobs", "schema", "several outputs"])
def test_stream_goes_on(server: LiveServer, expected: dict[str, dict[int, Output]], name: str) -> None:
    before = restarts(server)
    with server.stream(*REQUESTS[name]) as reader:
        reader.read_tokens(READ)
        server.kill_instance()
        reader.read_all()
    assert restarts(server) == before + 1
    assert said(reader.outputs) == expected[name]
    assert f"the instance ended with {len(expected[name])} requests in flight" in last_death(server)


def test_many_streams_go_on(server: LiveServer, expected: dict[str, dict[int, Output]]) -> None:
    """16 at once, two of each kind."""
    names = 2 * [name for name in REQUESTS if name != "several outputs"]
    with ExitStack() as stack:
        readers = open_together(stack, server, names)
        read_together(readers, READ)
        server.kill_instance()
        read_together(readers, None)
    assert "the instance ended with 16 requests in flight" in last_death(server)
    for name, reader in zip(names, readers, strict=True):
        assert said(reader.outputs) == expected[name], name


def test_whole_reply_comes(server: LiveServer, expected: dict[str, dict[int, Output]]) -> None:
    """A client that does not stream sees only that it takes longer."""
    path, body = REQUESTS["seeded"]
    replies: list[Any] = []

    def ask() -> None:
        with server.client() as client:
            replies.append(client.post(path, json=body).json())

    before = server.generated()
    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: server.generated() >= before + READ, "the request runs")
    server.kill_instance()
    asking.join()
    [choice] = replies[0]["choices"]
    assert (choice["text"], choice["token_ids"]) == (expected["seeded"][0].text, expected["seeded"][0].token_ids)
    assert "the instance ended with 1 requests in flight" in last_death(server)


def open_together(stack: ExitStack, server: LiveServer, names: Sequence[str]) -> list[EventReader]:
    """Streams of these requests, all sent at once: none is near its end when the last one begins."""
    streams = [server.stream(*REQUESTS[name]) for name in names]
    with ThreadPoolExecutor(len(streams)) as pool:
        return list(pool.map(stack.enter_context, streams))


def read_together(readers: Sequence[EventReader], count: int | None) -> None:
    """Read every stream in a thread of its own: `count` tokens, or to the end. Raises what reading raised."""
    errors: list[BaseException] = []

    def read(reader: EventReader) -> None:
        try:
            reader.read_all() if count is None else reader.read_tokens(count)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_death_after_death(server: LiveServer) -> None:
    """As long as it gets on in between, a request survives any number of deaths; also of an instance that loads."""
    path, body = completion("again and again", seed=20, max_tokens=300, logprobs=1)
    expected = run(server, path, body)
    before = restarts(server)
    with server.stream(path, body) as reader:
        for read in (READ, 80, 150):
            reader.read_tokens(read)
            dying = server.instances()
            server.kill_instance()
        wait_until(lambda: server.instances() not in (dying, []), "the next instance starts")
        server.kill_instance()
        reader.read_all()
    assert restarts(server) == before + 4
    assert said(reader.outputs) == expected


def test_new_requests_wait_for_the_next_instance(server: LiveServer, expected: dict[str, dict[int, Output]]) -> None:
    wait_until(lambda: len(server.instances()) == 1, "an instance runs")
    server.kill_instance()
    assert run(server, *REQUESTS["greedy"]) == expected["greedy"]
    with server.client() as client:
        assert client.get("/ready").status_code == 200


def test_one_of_two_dies(live_model: Path, expected: dict[str, dict[int, Output]]) -> None:
    """Its streams go on at the other one at once, whose own are not disturbed; then there are two again."""
    names = 2 * [name for name in REQUESTS if name != "several outputs"]
    with LiveServer(live_model, *FLAGS, "--instances", "2", "--routing", "round-robin") as server:
        assert " 2 instances," in server.ready_line
        wait_until(lambda: "(2 of 2)" in server.log, "the second instance joins")
        with ExitStack() as stack:
            readers = open_together(stack, server, names)
            read_together(readers, 1)  # no more: the instance that dies must not be through with its own
            server.instances()[0].kill()
            read_together(readers, None)
        moved = int(re.findall(r"the instance ended with (\d+) requests", last_death(server))[0])
        assert 1 <= moved <= len(names) // 2
        for name, reader in zip(names, readers, strict=True):
            assert said(reader.outputs) == expected[name], name
        wait_until(lambda: len(server.instances()) == 2, "the dead instance is replaced")
        assert restarts(server) == 1
        assert "Traceback" not in server.log


@pytest.mark.slow
def test_instance_that_hangs(server: LiveServer, expected: dict[str, dict[int, Output]]) -> None:
    """One that stands still is replaced when it has not answered heartbeats for half a minute."""
    with server.stream(*REQUESTS["seeded"]) as reader:
        reader.read_tokens(READ)
        [instance] = server.instances()
        instance.suspend()
        reader.read_all()
    assert said(reader.outputs) == expected["seeded"]
    assert not instance.is_running()
