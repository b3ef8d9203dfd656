"""Requests for JSON by schema and for tool calls, and whether an answer is what the schema asks for.

Every string and list in the schemas has a greatest length, so that any model gets to the end of its answer, and
strings are of letters: a random model would write escapes of half a character, which JSON allows and Python does not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kllm.request import InvalidRequest, StructuredOutputs
from kllm.tokenization.chat_template import ChatTemplate
from kllm.tokenization.tokenizer import Tokenizer

MAX_ANSWER_TOKENS = 800  # the longest of these answers in bytes, with 20 blanks wherever JSON allows them
Word = Annotated[str, Field(pattern="^[A-Za-z ]{1,16}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _City(_Strict):
    name: Word
    country: Word
    population: int = Field(ge=0, le=50_000_000)
    capital: bool


class _Recipe(_Strict):
    title: Word
    servings: int = Field(ge=1, le=12)
    ingredients: list[Word] = Field(min_length=1, max_length=3)
    difficulty: Literal["easy", "medium", "hard"]


class _WeatherArguments(_Strict):
    city: Word
    unit: Literal["celsius", "fahrenheit"]


class _Weather(_Strict):
    name: Literal["get_weather"]
    arguments: _WeatherArguments


class _TimerArguments(_Strict):
    minutes: int = Field(ge=1, le=600)


class _Timer(_Strict):
    name: Literal["set_timer"]
    arguments: _TimerArguments


_TOOLS = "You have two tools, get_weather and set_timer. Answer with a call of one of them, as JSON. "
_QUESTIONS: tuple[tuple[str, str, Any], ...] = (
    ("city", "Describe the city of Paris as JSON.", _City),
    ("recipe", "Give me a recipe for pancakes as JSON.", _Recipe),
    ("tool call: weather", _TOOLS + "What is the weather in Rome?", _Weather | _Timer),
    ("tool call: timer", _TOOLS + "Wake me up in 20 minutes.", _Weather | _Timer),
)


@dataclass(frozen=True)
class StructuredTask:
    """spec: what the engine is asked to keep to; answer_type: what judges the answer, independently of the engine."""

    name: str
    prompt: list[int]
    spec: StructuredOutputs
    answer_type: TypeAdapter[Any]

    def accepts(self, answer: str) -> bool:
        try:
            self.answer_type.validate_json(answer)
        except ValidationError:
            return False
        return True


def make_structured_tasks(tokenizer: Tokenizer) -> list[StructuredTask]:
    template = ChatTemplate.of(tokenizer)
    tasks = []
    for name, question, kind in _QUESTIONS:
        try:
            prompt = template.render([{"role": "user", "content": question}])
        except InvalidRequest:  # no chat template, or one of its own kind: schemas hold for plain prompts as well
            prompt = f"{question}\n"
        answer_type = TypeAdapter[Any](kind)
        spec = StructuredOutputs(json=json.dumps(answer_type.json_schema()))
        tasks.append(StructuredTask(name, tokenizer.encode(prompt, add_special_tokens=False), spec, answer_type))
    return tasks
