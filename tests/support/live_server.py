"""`kllm serve` as an operator starts it: a process of its own, with a real instance process and a real socket."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

START_S = 180  # limits on hangs, not on speed: the machine may be busy with other things
HANG_S = 180
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
_READY = re.compile(r"kLLM is ready: (http://\S+) serves (\S+),")


def serve_command(model: Path | str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "kllm.cli", "serve", str(model), "--port", "0", *flags]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until the condition holds; AssertionError after HANG_S."""
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end, f"waited {HANG_S} s in vain: {what}"
        time.sleep(0.01)


class LiveServer:
    """A context manager around one `kllm serve`. On leaving, the server is told to stop if it still runs, and must be
    gone with its instance and, if it ended well, its temporary files. What it logged is in `log`."""

    def __init__(self, model: Path | str, *flags: str, api_key: str | None = None) -> None:
        self.api_key = api_key
        keys = ("--api-key", api_key) if api_key else ()
        self._command = serve_command(model, *flags, *keys)
        self._folder = tempfile.TemporaryDirectory(prefix="kllm-test-")  # its TMPDIR
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed on leaving

    def __enter__(self) -> LiveServer:
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "TMPDIR": self._folder.name},
        )
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        try:
            assert self.process.stdout is not None
            self.ready_line = self.process.stdout.readline()
            ready = _READY.match(self.ready_line)
            if ready is None:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the server did not start: {self.ready_line!r}\n{self.log}")
        finally:
            watchdog.cancel()
        self.url, self.model = ready.groups()
        return self

    def __exit__(self, *error: object) -> None:
        instances = self.instances()
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            self.process.wait(HANG_S)
            _, alive = psutil.wait_procs(instances, HANG_S)
            assert not alive, f"processes outlived the server: {alive}"
            left = os.listdir(self._folder.name)
            assert self.process.returncode != 0 or not left, f"files outlived the server: {left}"
        finally:
            for process in (self.process, *instances):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.communicate()
            if error[0] is not None:
                print(self.log, file=sys.stderr)  # pytest shows it beside the failure
            self._log.close()
            self._folder.cleanup()

    @property
    def log(self) -> str:
        """All that it has written to standard error."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    # -- processes -------------------------------------------------------------------------------------------

    def instances(self) -> list[psutil.Process]:
        """Its instance processes that are alive: one, but for the moment of a restart."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]

    def kill_instance(self) -> None:
        """SIGKILL, as the kernel does when memory is short; of several instances the first."""
        self.instances()[0].kill()

    # -- clients ---------------------------------------------------------------------------------------------

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def client(self) -> httpx.Client:
        # Certificates are not needed, and loading them takes longer than many a request here.
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=HANG_S, verify=False)

    @contextlib.contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[EventReader]:
        """Post with stream=true; leaving early closes the connection."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self.client() as client, client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
                raise AssertionError(response.text)
            yield EventReader(response.iter_lines())

    def complete(self, body: dict[str, Any], path: str = TEXT) -> Output:
        """A whole stream, undisturbed, as one output."""
        with self.stream(path, body) as reader:
            reader.read_all()
        return reader.outputs[0]

    # -- what it says of itself ------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name, summed over labels; those with a `finished_reason` or `tier` also as
        name:reason or name:tier."""
        with self.client() as client:
            text = client.get("/metrics").text
        samples: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("#"):
                continue
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            names = [name, *(f"{name}:{reason}" for reason in re.findall(r'(?:finished_reason|tier)="(\w+)"', labels))]
            for key in names:
                samples[key] = samples.get(key, 0.0) + float(value)
        return samples

    def generated(self) -> float:
        """Tokens that have come from its instances so far."""
        return self.metrics()["kllm:generation_tokens_total"]

    def wait_idle(self) -> None:
        """Nothing runs, nothing waits, and no request holds KV blocks."""

        def idle() -> bool:
            now = self.metrics()
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            return not any(now[f"kllm:{name}"] for name in names)

        wait_until(idle, "the server does not become idle")


@dataclass
class Output:
    """One choice, joined from its chunks. usage: that of the whole reply."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: dict[str, Any] | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """A choice of a chunk, or of a whole reply."""
        assert self.finish_reason is None, "a choice goes on after its end"
        said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        self.text += said.get("content") or ""
        self.token_ids += choice.get("token_ids") or []
        self.finish_reason = choice["finish_reason"]
        self.stop_reason = choice.get("stop_reason")
        self._add_logprobs(choice.get("logprobs"))

    def _add_logprobs(self, logprobs: dict[str, Any] | None) -> None:
        if logprobs is not None and "content" in logprobs:
            self.logprobs += logprobs["content"]
        elif logprobs is not None:
            columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            self.logprobs += zip(*(logprobs[column] for column in columns), strict=True)


class EventReader:
    """Reads server-sent events of a completion. outputs: by choice, as far as they have been read."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self.outputs: dict[int, Output] = {}
        self.chunks = 0
        self.done = False

    def read_one(self) -> None:
        """The next event. AssertionError for an error event, or an end without [DONE]."""
        line = next((line for line in self._lines if line), None)
        assert line is not None, "the stream broke off"
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            self.done = True
            return
        chunk = json.loads(line[6:])
        assert "error" not in chunk, chunk
        self.chunks += 1
        for choice in chunk["choices"]:
            self.outputs.setdefault(choice["index"], Output()).add(choice)
        if chunk.get("usage") is not None:
            for output in self.outputs.values():
                output.usage = chunk["usage"]

    def read_tokens(self, count: int) -> None:
        """Until every choice seen so far has at least this many tokens (with return_token_ids)."""
        while not self.outputs or min(len(output.token_ids) for output in self.outputs.values()) < count:
            self.read_one()
            assert not self.done, "the stream ended early"

    def read_all(self) -> None:
        while not self.done:
            self.read_one()
