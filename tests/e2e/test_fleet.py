"""Real instances that outlive their gateways, and real gateways that share them: deaths on both sides."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.live_fleet import LiveGateway, LiveInstance
from support.live_server import TEXT, LiveServer, Output, wait_until

ENGINE = ("--threads", "1", "--dtype", "float32", "--kernels", "invariant", "--num-kv-blocks", "600")


def body(prompt: str, length: int = 200) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": length, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="kllm-") as name:
        yield Path(name)


def write_fleet(path: Path, model: Path, addresses: Sequence[str]) -> Path:
    members = "".join(f'[[instance]]\naddress = "{address}"\n' for address in addresses)
    path.write_text(f'model = "{model}"\n[server]\nrouting = "cache-aware"\n{members}')
    return path


def all_ready(gateway: LiveServer, count: int) -> bool:
    with gateway.client() as client:
        states = [each["state"] for each in client.get("/debug/fleet").json()["instances"]]
    return states.count("ready") == count


def complete_all(gateways: Sequence[LiveServer], prompts: Sequence[str], length: int = 200) -> list[Output]:
    """All prompts at once, dealt out to the gateways."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        work = [pool.submit(gateways[i % len(gateways)].complete, body(text, length)) for i, text in enumerate(prompts)]
        return [each.result() for each in work]


def cached_tokens(server: LiveServer, prompt: str) -> int:
    with server.client() as client:
        reply = client.post(TEXT, json={"prompt": prompt, "max_tokens": 2, "temperature": 0})
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_kill_of_one_of_two_gateways(live_model: Path, folder: Path) -> None:
    """The other goes on, the instances drop what the dead one had, and it comes back knowing what they cache."""
    with ExitStack() as stack:
        instances = [
            stack.enter_context(LiveInstance(live_model, "--listen", f"ipc://{folder}/{name}", *ENGINE))
            for name in "ab"
        ]
        for instance in instances:
            instance.wait_ready()
        config = write_fleet(folder / "fleet.toml", live_model, [instance.address for instance in instances])
        dying, other = (stack.enter_context(LiveGateway(config)) for _ in range(2))
        for gateway in (dying, other):
            wait_until(lambda gateway=gateway: all_ready(gateway, 2), "both instances are there")  # type: ignore[misc]
        prompts = [f"{number} the quick brown fox " + "jumps over the lazy dog " * 6 for number in range(6)]
        expected = [other.complete(body(prompt)) for prompt in prompts]
        together = complete_all((dying, other), prompts)
        assert [output.token_ids for output in together] == [output.token_ids for output in expected]

        with ThreadPoolExecutor(6) as pool, ExitStack() as streams:
            lost = [streams.enter_context(dying.stream(TEXT, body(f"{i} lost", 3000))) for i in range(3)]
            work = [pool.submit(other.complete, body(prompt)) for prompt in prompts]
            for reader in lost:
                reader.read_tokens(5)
            dying.process.kill()
            dying.process.wait()
            outputs = [each.result() for each in work]
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        other.wait_idle()  # with the blocks of the dead one's requests free again, long before these could have ended
        assert all("is gone with" in instance.log for instance in instances)

        again = stack.enter_context(LiveGateway(config))
        wait_until(lambda: all_ready(again, 2), "both instances are there")
        wait_until(lambda: cached_tokens(again, prompts[0]) > 100, "the dumps have come")
        assert all(cached_tokens(again, prompt) > 100 for prompt in prompts)


@pytest.mark.slow
def test_instances_die_leave_and_join(live_model: Path, folder: Path) -> None:
    """kill -9, SIGTERM and SIGHUP, with streams open: no stream notices."""
    prompts = [f"{number} and so on" for number in range(4)]
    with ExitStack() as stack:
        a, b = (
            stack.enter_context(LiveInstance(live_model, "--listen", f"ipc://{folder}/{name}", *ENGINE))
            for name in "ab"
        )
        config = write_fleet(folder / "fleet.toml", live_model, [a.address, b.address])
        gateway = stack.enter_context(LiveGateway(config))
        wait_until(lambda: all_ready(gateway, 2), "both instances are there")
        expected = [gateway.complete(body(prompt, 400)).token_ids for prompt in prompts]

        def undisturbed(disturb: Any) -> bool:
            """All streams say the same when this happens under them."""
            with ExitStack() as streams:
                readers = [streams.enter_context(gateway.stream(TEXT, body(prompt, 400))) for prompt in prompts]
                for reader in readers:
                    reader.read_tokens(12)
                disturb()
                for reader in readers:
                    reader.read_all()
            return [reader.outputs[0].token_ids for reader in readers] == expected

        assert undisturbed(a.process.kill)
        a.process.wait()
        again = stack.enter_context(LiveInstance(live_model, "--listen", a.address, *ENGINE))
        wait_until(lambda: all_ready(gateway, 2), "it is there again")
        assert undisturbed(lambda: b.process.send_signal(signal.SIGTERM))
        assert b.process.wait() == 0

        third = stack.enter_context(LiveInstance(live_model, "--listen", "tcp://127.0.0.1:0", *ENGINE))
        write_fleet(config, live_model, [again.address, third.address])
        gateway.process.send_signal(signal.SIGHUP)
        wait_until(lambda: all_ready(gateway, 2), "the third has joined")
        write_fleet(config, live_model, [third.address])
        assert undisturbed(lambda: gateway.process.send_signal(signal.SIGHUP))
        wait_until(lambda: all_ready(gateway, 1), "the first has left")
        write_fleet(config, live_model, ["nowhere"])
        gateway.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "everything stays as it is" in gateway.log, "the mistake is reported")
        assert undisturbed(lambda: None)
