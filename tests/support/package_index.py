"""A Python package index and a model hub on a free local port, for real pip and real huggingface_hub to talk to."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def write_wheel(path: Path, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts; path's name says which package it is."""
    package, version = path.name.split("-")[:2]
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


class LocalServer:
    """Serves files. `hold_halfway`: the next wheel stops after half of its bytes, `halfway` is set, and nothing more
    comes until `resume` is set. requests: "METHOD path" of every request so far."""

    def __init__(self, wheel: Path | None = None, repository: dict[str, bytes] | None = None) -> None:
        self.wheel = wheel
        self.repository = repository or {}
        self.requests: list[str] = []
        self.hold_halfway = False
        self.halfway = threading.Event()
        self.resume = threading.Event()
        self.url = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(f"{handler.command} {handler.path}")
        path = handler.path.split("?")[0]
        if self.wheel is not None and path.endswith(self.wheel.name):
            self._send_wheel(handler)
        elif path.startswith("/simple/") and self.wheel is not None:
            page = f'<a href="/files/{self.wheel.name}">{self.wheel.name}</a>'.encode()
            _send(handler, page, {"Content-Type": "text/html"})
        elif path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in self.repository.items()]
            tree = [{"type": "file", "path": s["rfilename"], "size": s["size"], "oid": "0" * 40} for s in siblings]
            body = tree if "/tree/" in path else {"id": "org/tiny", "sha": "a" * 40, "siblings": siblings}
            _send(handler, json.dumps(body).encode(), {"Content-Type": "application/json"})
        elif "/resolve/" in path and (name := path.rsplit("/", 1)[1]) in self.repository:
            content = self.repository[name]
            _send(handler, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": "a" * 40})
        else:
            handler.send_response(404)
            handler.send_header("X-Error-Code", "RepoNotFound" if path.startswith("/api/") else "EntryNotFound")
            handler.send_header("Content-Length", "0")
            handler.end_headers()

    def _send_wheel(self, handler: BaseHTTPRequestHandler) -> None:
        assert self.wheel is not None
        content = self.wheel.read_bytes()
        if not self.hold_halfway:
            _send(handler, content, {"Content-Type": "application/octet-stream"})
            return
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[: len(content) // 2])
        handler.wfile.flush()
        self.halfway.set()
        self.resume.wait(60)
        handler.wfile.write(content[len(content) // 2 :])


def _send(handler: BaseHTTPRequestHandler, content: bytes, headers: dict[str, str]) -> None:
    handler.send_response(200)
    for key, value in {**headers, "Content-Length": str(len(content))}.items():
        handler.send_header(key, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(content)


@contextmanager
def serving(server: LocalServer) -> Iterator[LocalServer]:
    """Run the server on a free port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                pass  # the client was killed, as some tests do

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.resume.set()
        http.shutdown()
        thread.join()
        http.server_close()
