"""A real model behind a real server and OpenAI's client: what a newcomer sees after `kllm serve smollm2`."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from support.live_server import CHAT, HANG_S, LiveServer, Output
from support.real_models import smollm2_or_skip

MODEL = "smollm2"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    smollm2_or_skip()
    with LiveServer(MODEL, "--kv-cache-memory", "512MiB", "--dtype", "float32", "--threads", "1") as running:
        yield running
        assert "Traceback" not in running.log


@pytest.fixture
def api(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HANG_S) as client:
        yield client


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


class City(BaseModel):
    name: str = Field(max_length=20)
    country: str = Field(max_length=20)
    continent: Literal["Europe", "Asia", "Africa", "America"]


def test_answers(api: openai.OpenAI) -> None:
    question = ask("What is the capital of France?")
    reply = api.chat.completions.create(model=MODEL, messages=question, temperature=0, max_completion_tokens=24)
    assert "Paris" in (reply.choices[0].message.content or "")
    stream = api.chat.completions.create(
        model=MODEL, messages=question, temperature=0, max_completion_tokens=24, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == reply.choices[0].message.content


def test_parsed_output(api: openai.OpenAI) -> None:
    question = ask("Tell me about the city of Rome as JSON.")
    reply = api.chat.completions.parse(model=MODEL, messages=question, response_format=City, temperature=0)
    city = reply.choices[0].message.parsed
    assert city is not None
    assert city.name.strip()


SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 30},
            "author": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
                "required": ["name", "age"],
                "additionalProperties": False,
            },
            "tags": {"type": "array", "items": {"enum": ["new", "old", "sold"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["title", "author", "tags"],
        "additionalProperties": False,
    },
    "references": {
        "$defs": {"point": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
                            "minItems": 2, "maxItems": 2}},
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        "additionalProperties": False,
    },
    "choices": {"anyOf": [{"const": "yes"}, {"const": "no"}, {"type": "integer", "minimum": 0, "maximum": 5}]},
    "date": {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"],
             "additionalProperties": False},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(api: openai.OpenAI, name: str, temperature: float) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMAS[name], "strict": True}}
    question = ask("Make up something that fits the form, as JSON.")
    reply = api.chat.completions.create(
        model=MODEL, messages=question, response_format=form, temperature=temperature, seed=1, n=3
    )
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content or "")
        check(SCHEMAS[name], value, SCHEMAS[name])


def check(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> None:
    """The part of JSON schema that SCHEMAS use."""
    if "$ref" in schema:
        check(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    elif "anyOf" in schema:
        assert value in ("yes", "no", 0, 1, 2, 3, 4, 5)
    elif "enum" in schema:
        assert value in schema["enum"]
    elif schema["type"] == "object":
        assert set(value) == set(schema["required"])
        for key, part in schema["properties"].items():
            check(part, value[key], root)
    elif schema["type"] == "array":
        assert schema["minItems"] <= len(value) <= schema["maxItems"]
        for item in value:
            check(schema["items"], item, root)
    elif schema["type"] == "integer":
        assert type(value) is int
        assert schema.get("minimum", value) <= value <= schema["maximum"]
    else:
        assert isinstance(value, str)
        assert len(value) <= schema.get("maxLength", len(value))
        assert "format" not in schema or re.fullmatch(r"\d{4}-\d{2}-\d{2}", value)


@pytest.mark.slow
def test_json_object(api: openai.OpenAI) -> None:
    """Valid JSON whenever the model ends by itself; a beginning of JSON when it is cut off."""
    question = ask("List three fruits with their colours as a short JSON object. Only JSON.")
    form: Any = {"type": "json_object"}
    reply = api.chat.completions.create(
        model=MODEL, messages=question, response_format=form, max_completion_tokens=200, seed=2, n=4, temperature=0.7
    )
    ended = [choice for choice in reply.choices if choice.finish_reason == "stop"]
    assert ended
    for choice in ended:
        assert isinstance(json.loads(choice.message.content or ""), dict)
    for choice in reply.choices:
        assert (choice.message.content or "").lstrip().startswith("{")


@pytest.mark.slow
def test_streams_survive_the_death_of_the_instance(server: LiveServer) -> None:
    """Eight conversations at once go on where they were, to their ends."""
    topics = ["rivers", "bread", "the moon", "ants", "chess", "rain", "trains", "salt"]
    outputs: dict[int, Output] = {}
    at_work = threading.Barrier(len(topics) + 1)

    def talk(number: int) -> None:
        body = {"messages": ask(f"Write about {topics[number]}."), "max_completion_tokens": 120, "seed": number,
                "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        with server.stream(CHAT, body) as reader:
            reader.read_tokens(10)
            at_work.wait(HANG_S)
            reader.read_all()
        outputs[number] = reader.outputs[0]

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(len(topics))]
    for thread in threads:
        thread.start()
    at_work.wait(HANG_S)
    server.kill_instance()
    for thread in threads:
        thread.join()
    assert [len(outputs[number].token_ids) for number in range(len(topics))] == [120] * len(topics)
    assert server.metrics()["kllm:instance_restarts_total"] == 1
