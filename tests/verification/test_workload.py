"""The prompts of a run: lengths, depths, and the judge of structured output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kllm.hub import resolve
from kllm.tokenization.tokenizer import Tokenizer, load_tokenizer
from kllm.verification.needles import make_needles
from kllm.verification.structured import make_structured_tasks
from kllm.verification.texts import corpus, windows
from kllm.verification.workload import FULL, QUICK, make_workload


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_folder: Path) -> Tokenizer:
    return load_tokenizer(resolve(str(tiny_llama_folder)))


def test_windows_are_the_text_in_order(tokenizer):
    text = corpus()
    cut = windows(text, tokenizer, tokens=200, window=64)
    assert [len(window) for window in cut] == [64, 64, 64]
    assert text.startswith(tokenizer.decode([token for window in cut for token in window]))


def test_less_text_than_a_window_makes_one_window(tokenizer):
    assert [len(window) for window in windows(corpus(), tokenizer, tokens=40, window=64)] == [40]


def test_too_little_text_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="the text has 5 tokens, but 40 are wanted"):
        windows("abcde", tokenizer, tokens=40, window=32)


def test_the_full_scale_scores_20_000_tokens():
    count = FULL.tokens // 512
    assert count * 511 >= 20_000
    assert (min(FULL.needle_tokens), max(FULL.needle_tokens)) == (1000, 4000)
    assert QUICK.tokens < FULL.tokens


def test_needles_lie_where_they_should(tokenizer):
    made = make_needles(corpus(), tokenizer, (300, 600), (0.0, 0.5, 1.0))
    assert [(needle.tokens, needle.depth) for needle in made] == [(n, d) for n in (300, 600) for d in (0.0, 0.5, 1.0)]
    for needle in made:
        text = tokenizer.decode(needle.prompt)
        before, after = text.split(f"office is {needle.code}.")
        filler = needle.tokens
        frame = len(needle.prompt) - filler
        assert 0 < frame < 300
        assert abs(len(tokenizer.encode(before)) - needle.depth * filler) < 110
        assert text.endswith("office is")
        assert needle.code not in after
        assert needle.found_in(f" {needle.code}.")
        assert not needle.found_in(" 12")


def test_needles_are_the_same_every_time(tokenizer):
    assert make_needles(corpus(), tokenizer, (100,), (0.5,)) == make_needles(corpus(), tokenizer, (100,), (0.5,))


def test_a_model_without_a_chat_template_gets_no_needles_but_structured_tasks(tokenizer):
    bare = Tokenizer(tokenizer.backend, bos_token_id=None, eos_token_ids=tokenizer.eos_token_ids)
    assert make_needles(corpus(), bare, (100,), (0.5,)) == []
    prompts = [bare.decode(task.prompt) for task in make_structured_tasks(bare)]
    assert prompts[0] == "Describe the city of Paris as JSON.\n"


@pytest.mark.parametrize(
    ("task", "answer", "accepted"),
    [
        ("city", '{"name": "Paris", "country": "France", "population": 2100000, "capital": true}', True),
        ("city", '{"name": "Paris", "country": "France", "population": "many", "capital": true}', False),
        ("city", '{"name": "Paris", "country": "France", "population": 1, "capital": true, "more": 1}', False),
        ("city", '{"name": "Paris", "country": "Fra', False),
        ("recipe", '{"title": "P", "servings": 13, "ingredients": ["egg"], "difficulty": "easy"}', False),
        ("tool call: timer", '{"name": "set_timer", "arguments": {"minutes": 20}}', True),
        ("tool call: timer", '{"name": "get_weather", "arguments": {"minutes": 20}}', False),
        ("tool call: timer", "", False),
    ],
)
def test_answers_are_judged_by_their_schema(tokenizer, task, answer, accepted):
    tasks = {task.name: task for task in make_structured_tasks(tokenizer)}
    assert tasks[task].accepts(answer) is accepted


def test_schemas_are_what_the_judge_expects(tokenizer):
    for task in make_structured_tasks(tokenizer):
        assert task.spec.json is not None
        assert '"additionalProperties": false' in task.spec.json
        json.loads(task.spec.json)


def test_room_for_the_longest_prompt_and_for_cached_windows(tokenizer):
    workload = make_workload(tokenizer, QUICK, window=64)
    assert len(workload.windows) == 32
    assert workload.longest > 1000
    assert workload.kv_tokens >= 2 * workload.longest
    assert workload.needles_within(512) == []
    assert len(workload.needles_within(4096)) == 2
