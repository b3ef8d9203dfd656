"""`kllm chat` against a small server, piped and in a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest


def command(url: str, api_key: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "kllm.cli", "chat", "--url", url, "--api-key", api_key, *flags]


def run(url: str, api_key: str, stdin: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(url, api_key, *flags), input=stdin, capture_output=True, text=True, timeout=60, check=False
    )


def test_piped_questions_give_answers_only(echo_server, api_key):
    result = run(echo_server.url, api_key, "hello\n\nhow are you?\n")
    assert (result.returncode, result.stdout) == (0, "echo: hello\necho: how are you?\n")
    assert result.stderr == ""


def test_history_is_sent_and_reset(echo_server, api_key):
    run(echo_server.url, api_key, "one\ntwo\n/reset\nthree\n/system Be kind.\nfour\n/exit\nfive\n", "--system", "Hi.")
    hi, kind = {"role": "system", "content": "Hi."}, {"role": "system", "content": "Be kind."}

    def said(text):
        return {"role": "user", "content": text}

    assert echo_server.requests == [
        [hi, said("one")],
        [hi, said("one"), {"role": "assistant", "content": "echo: one"}, said("two")],
        [hi, said("three")],
        [kind, said("four")],
    ]


def test_sampling_flags_are_sent(echo_server, api_key):
    run(echo_server.url, api_key, "x\n", "--temperature", "0", "--max-tokens", "7")
    (body,) = echo_server.bodies
    assert (body["temperature"], body["max_completion_tokens"], body["model"], body["stream"]) == (0, 7, "echo", True)


@pytest.mark.parametrize(("question", "message"), [("refuse", "not today"), ("break", "the engine broke")])
def test_a_server_error_ends_a_piped_chat(echo_server, api_key, question, message):
    result = run(echo_server.url, api_key, f"{question}\nmore\n")
    assert result.returncode == 1
    assert result.stderr == f"kllm: error: {message}\n"
    assert len(echo_server.requests) == 1


def test_wrong_key_and_no_server_are_one_line(echo_server):
    result = run(echo_server.url, "wrong", "x\n")
    assert (result.returncode, result.stderr) == (1, f"kllm: error: {echo_server.url}/v1/models: wrong key\n")
    result = run("http://127.0.0.1:1", "k", "x\n")
    assert result.returncode == 1
    assert "no server answers at http://127.0.0.1:1" in result.stderr


class Terminal:
    """A process on a pseudo-terminal of its own."""

    def __init__(self, arguments: list[str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(arguments[0], arguments)
        self.seen = ""

    def expect(self, text: str, timeout: float = 30.0) -> None:
        """Read until `text` comes; what is before it is dropped."""
        deadline = time.monotonic() + timeout
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            self.seen += os.read(self.fd, 4096).decode(errors="replace")
        self.seen = self.seen.split(text, 1)[1]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(echo_server, api_key):
    terminal = Terminal(command(echo_server.url, api_key))
    terminal.expect("echo. /reset")
    terminal.expect("> ")
    terminal.type("slow one\n")
    assert echo_server.started.wait(30)
    terminal.expect("… ")
    terminal.type("\x03")
    terminal.expect("[stopped]")
    assert echo_server.hung_up.wait(30)
    terminal.expect("> ")
    terminal.type("refuse\n")
    terminal.expect("[not today]")
    terminal.expect("> ")
    terminal.type("next\n")
    terminal.expect("echo: next")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.wait() == 0
    last = echo_server.requests[-1]
    assert last[1]["content"].startswith("echo: …")
    assert [message["content"] for message in last[::2]] == ["slow one", "next"]
