"""Chat in the terminal: the history, the commands, and answers as they stream."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Generator
from typing import Any

import httpx

from kllm.cli.errors import CommandError

HELP = "/reset forgets the conversation, /system TEXT sets the system prompt, /exit leaves; Ctrl-C stops an answer."


class ChatClient:
    """Streams answers from /v1/chat/completions of one server."""

    def __init__(self, url: str, api_key: str | None, sampling: dict[str, Any]) -> None:
        """sampling: further fields of every request, such as temperature."""
        self._url = url.rstrip("/")
        self._sampling = sampling
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(30.0, read=None),  # an answer may wait for its turn for as long as it takes
        )
        self.model = self._first_model()

    def answer(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        """The answer in pieces. Closing the iterator aborts the request. Raises CommandError."""
        body = {"model": self.model, "messages": messages, "stream": True, **self._sampling}
        try:
            with self._http.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise CommandError(_error_text(response))
                for line in response.iter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        yield _text(json.loads(data))
        except httpx.HTTPError as error:
            raise CommandError(f"the server at {self._url} is gone: {error or type(error).__name__}") from error

    def _first_model(self) -> str:
        try:
            response = self._http.get(f"{self._url}/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CommandError(f"no server answers at {self._url}: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise CommandError(f"{self._url}/v1/models: {_error_text(response)}")
        try:
            return str(response.json()["data"][0]["id"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CommandError(f"{self._url}/v1/models does not list a model") from error


class Conversation:
    """What has been said. An answer that was stopped stays as far as it went."""

    def __init__(self, system: str | None) -> None:
        self._system = system
        self._turns: list[dict[str, str]] = []

    def reset(self) -> None:
        self._turns.clear()

    def set_system(self, text: str) -> None:
        """Also forgets the conversation: it was held under another system prompt."""
        self._system = text or None
        self.reset()

    def messages(self, question: str) -> list[dict[str, str]]:
        """Everything so far and the new question, as the API takes it."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._turns, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        self._turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def run_chat(client: ChatClient, system: str | None) -> None:
    """Read questions until /exit or the end of input. Without a terminal only answers are printed."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        import readline  # noqa: F401  gives input() line editing and a history

        # a parent that runs its jobs in the background may have left Ctrl-C ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print(f"{client.model}. {HELP}")
    conversation = Conversation(system)
    while (line := _read_line(interactive)) is not None:
        command, _, argument = line.partition(" ")
        if command == "/exit":
            return
        if command == "/reset":
            conversation.reset()
        elif command == "/system":
            conversation.set_system(argument.strip())
        elif command == "/help":
            print(HELP)
        elif line:
            _one_turn(client, conversation, line, interactive)


def _read_line(interactive: bool) -> str | None:
    """The next line without outer spaces; None at the end of input. Ctrl-C abandons the line being typed."""
    while True:
        try:
            return input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return None
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()


def _one_turn(client: ChatClient, conversation: Conversation, question: str, interactive: bool) -> None:
    pieces: list[str] = []
    stream = client.answer(conversation.messages(question))
    try:
        for piece in stream:
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if not interactive:
            raise
        print(" [stopped]", end="")
    except CommandError as error:
        if not interactive:
            raise
        print(f"[{error}]", end="")
    finally:
        stream.close()  # hangs up, which aborts what is left of the request
        print()
    if pieces:
        conversation.add(question, "".join(pieces))


def _text(chunk: dict[str, Any]) -> str:
    if "error" in chunk:
        raise CommandError(str(chunk["error"].get("message", chunk["error"])))
    return "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))


def _error_text(response: httpx.Response) -> str:
    """The message of an error in OpenAI's form, or whatever came instead."""
    try:
        return str(response.json()["error"]["message"])
    except (KeyError, TypeError, ValueError):
        return f"HTTP {response.status_code} {response.text[:200]}".strip()
