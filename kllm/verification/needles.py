"""Needles: a fact hidden in long text, and a question that only a reader of all of it can answer."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kllm.request import InvalidRequest
from kllm.tokenization.chat_template import ChatTemplate
from kllm.tokenization.tokenizer import Tokenizer

MAX_ANSWER_TOKENS = 12
_CITIES = ("Dublin", "Lisbon", "Oslo", "Prague", "Vienna")
_CHARACTERS_PER_TOKEN = 6  # more than any tokenizer needs of English text, so that the cut text is long enough
_SEED = 7


@dataclass(frozen=True)
class Needle:
    """tokens: length of the text around it. depth: where in that text it lies, 0 to 1. code: the right answer."""

    tokens: int
    depth: float
    code: str
    prompt: list[int]

    def found_in(self, answer: str) -> bool:
        return self.code in answer


def make_needles(text: str, tokenizer: Tokenizer, lengths: tuple[int, ...], depths: tuple[float, ...]) -> list[Needle]:
    """One per length and depth, always the same ones; none for a model without a chat template.

    The start of the answer is given, so that small models, too, answer with the code and do not chat."""
    template = ChatTemplate.of(tokenizer)
    rng = random.Random(_SEED)
    needles = []
    for length in lengths:
        for depth in depths:
            code, city = str(rng.randrange(10_000, 100_000)), rng.choice(_CITIES)
            offset = rng.randrange(max(1, len(text) - _CHARACTERS_PER_TOKEN * length))
            filler = text[offset : offset + _CHARACTERS_PER_TOKEN * length]
            ids = tokenizer.encode(filler, add_special_tokens=False)[:length]
            before, after = (
                tokenizer.decode(part) for part in (ids[: round(depth * length)], ids[round(depth * length) :])
            )
            question = (
                f"Read this text.\n\n{before}\n\nThe access code of the {city} office is {code}.\n\n{after}\n\n"
                f"What is the access code of the {city} office?"
            )
            try:
                prompt = template.render([{"role": "user", "content": question}])
            except InvalidRequest:
                return []
            prompt += f"The access code of the {city} office is"
            needles.append(Needle(length, depth, code, tokenizer.encode(prompt, add_special_tokens=False)))
    return needles
