from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import tiny_tokenizer

from kllm.request import SamplingParams
from kllm.tokenization.detokenizer import Detokenizer, TextDelta
from kllm.tokenization.tokenizer import Tokenizer

BACKEND = tiny_tokenizer()
EOS = BACKEND.token_to_id("<|im_end|>")
TOKENIZER = Tokenizer(BACKEND, bos_token_id=None, eos_token_ids=[EOS], eos_token="<|im_end|>")
PROMPT = TOKENIZER.encode("The prompt:")

texts = st.text(alphabet="abth erin é€😀漢\ufffd\n", max_size=30) | st.text(max_size=12)
stops = st.lists(st.text(alphabet="abth €😀", min_size=1, max_size=4), max_size=3, unique=True)
raw_ids = st.lists(st.integers(0, 287), max_size=40)


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**fields)  # type: ignore[arg-type]


def push_all(
    ids: list[int], sizes: list[int], sampling: SamplingParams, prompt: list[int] = PROMPT
) -> tuple[list[str], list[int], str | None]:
    """(text of each push, kept ids, stop) with pushes of the given sizes, over and over."""
    detokenizer = Detokenizer(TOKENIZER, sampling, prompt)
    pieces: list[str] = []
    kept: list[int] = []
    done = 0
    while True:
        size = sizes[len(pieces) % len(sizes)]
        part = ids[done : done + size]
        done += size
        delta = detokenizer.push(part, finished=done >= len(ids))
        pieces.append(delta.text)
        kept += part[: delta.num_tokens_kept]
        if delta.stop is not None or done >= len(ids):
            return pieces, kept, delta.stop


def naive(ids: list[int], sampling: SamplingParams) -> tuple[str, int, str | None]:
    """(text, number of tokens, stop) by decoding everything and looking at every character.

    A character belongs to the token that completes it: the first prefix of ids whose text, the bytes that may still
    become a character left out, contains it."""
    skip = sampling.skip_special_tokens
    full = TOKENIZER.decode(ids, skip)
    lengths = []
    for i in range(len(ids) + 1):
        text = TOKENIZER.decode(ids[:i], skip)
        lengths.append(len(full) if i == len(ids) else len(text.removesuffix("\ufffd")))
    shown = [max(lengths[: i + 1]) for i in range(len(lengths))]
    for end in range(1, len(full) + 1):
        token = next(i for i, length in enumerate(shown) if length >= end)
        found = [stop for stop in sampling.stop if full[:end].endswith(stop)]
        if found and token > sampling.min_tokens:
            stop = max(found, key=len)
            return full[: end if sampling.include_stop_str_in_output else end - len(stop)], token, stop
    return full, len(ids), None


@settings(max_examples=120, deadline=None)
@given(texts, stops, st.integers(0, 6), st.booleans())
def test_equals_decoding_everything_and_cutting(text: str, stop: list[str], min_tokens: int, include: bool) -> None:
    sampling = params(stop=tuple(stop), min_tokens=min_tokens, include_stop_str_in_output=include)
    ids = TOKENIZER.encode(text)
    pieces, kept, found = push_all(ids, [1], sampling)
    expected, count, expected_stop = naive(ids, sampling)
    assert ("".join(pieces), found) == (expected, expected_stop)
    if found is not None and "\ufffd" not in text:  # a literal U+FFFD waits for the token after it
        assert kept == ids[:count]


@settings(max_examples=120, deadline=None)
@given(raw_ids | texts.map(TOKENIZER.encode), stops, st.lists(st.integers(1, 7), min_size=1, max_size=4), st.booleans())
def test_pushes_of_any_size_give_the_same(ids: list[int], stop: list[str], sizes: list[int], include: bool) -> None:
    sampling = params(stop=tuple(stop), min_tokens=2, include_stop_str_in_output=include)
    one = push_all(ids, [1], sampling)
    several = push_all(ids, sizes, sampling)
    assert "".join(several[0]) == "".join(one[0])
    assert several[1:] == one[1:]


@settings(max_examples=120, deadline=None)
@given(raw_ids, raw_ids, st.booleans())
def test_any_ids_decode_as_at_once(prompt: list[int], ids: list[int], skip: bool) -> None:
    sampling = params(skip_special_tokens=skip)
    prompt = [*prompt, 64]  # whole text: what a broken prompt's bytes mean is tested below
    text = "".join(push_all(ids, [1], sampling, prompt)[0])
    assert text == TOKENIZER.decode([*prompt, *ids], skip)[len(TOKENIZER.decode(prompt, skip)) :]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(TOKENIZER.encode("😀漢é€")), min_size=20, max_size=120))
def test_bytes_that_never_become_text_stay_exact(ids: list[int]) -> None:
    assert "".join(push_all(ids, [1], params())[0]) == TOKENIZER.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="aé€😀漢👩‍👩‍👧", min_size=1, max_size=20))
def test_no_replacement_characters_while_streaming(text: str) -> None:
    pieces, _, _ = push_all(TOKENIZER.encode(text), [1], params())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_incomplete_character_at_the_end_is_flushed_once() -> None:
    ids = TOKENIZER.encode("a€")[:-1]
    detokenizer = Detokenizer(TOKENIZER, params(), PROMPT)
    assert [detokenizer.push([i]).text for i in ids] == ["a", "", ""]
    assert detokenizer.push([], finished=True) == TextDelta("\ufffd", 0, None)


def test_prompt_that_ends_inside_a_character() -> None:
    euro = TOKENIZER.encode("€")
    assert "".join(push_all(euro[1:] + TOKENIZER.encode("!"), [1], params(), PROMPT + euro[:1])[0]) == "€!"
    assert "".join(push_all(TOKENIZER.encode("!"), [1], params(), PROMPT + euro[:1])[0]) == "!"


def test_stop_string_never_leaks_its_beginning() -> None:
    pieces, kept, stop = push_all(TOKENIZER.encode("one END tEN"), [1], params(stop=("END",)))
    assert ("".join(pieces), stop) == ("one ", "END")
    assert not any("E" in piece for piece in pieces)
    assert TOKENIZER.decode(kept) == "one END"
    pieces, _, stop = push_all(TOKENIZER.encode("one ENx"), [1], params(stop=("END",)))
    assert ("".join(pieces), stop) == ("one ENx", None)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("xabcab", ("ab", "bc"), ("x", "ab")),  # ab is complete before bc
        ("xabc", ("abc", "bc"), ("x", "abc")),  # both at once: the longer
        ("xabc", ("abcd", "c"), ("xab", "c")),
        ("aaab", ("aab",), ("a", "aab")),  # the beginning starts again inside itself
        ("ababac", ("abac",), ("ab", "abac")),
    ],
)
def test_which_stop_wins(text: str, stop: tuple[str, ...], expected: tuple[str, str]) -> None:
    for size in (1, 2, 100):
        pieces, _, found = push_all(TOKENIZER.encode(text), [size], params(stop=stop))
        assert ("".join(pieces), found) == expected


def test_tokens_after_the_completing_one_are_dropped() -> None:
    ids = TOKENIZER.encode("xy;zw")
    delta = Detokenizer(TOKENIZER, params(stop=(";",)), PROMPT).push(ids)
    assert delta == TextDelta("xy", 3, ";")
    delta = Detokenizer(TOKENIZER, params(stop=(";",), include_stop_str_in_output=True), PROMPT).push(ids)
    assert delta == TextDelta("xy;", 3, ";")


def test_min_tokens_holds_stop_strings_off() -> None:
    ids = TOKENIZER.encode("a;b;c")
    assert Detokenizer(TOKENIZER, params(stop=(";",), min_tokens=2), PROMPT).push(ids) == TextDelta("a;b", 4, ";")


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_has_no_text_unless_asked(include: bool) -> None:
    sampling = params(include_stop_str_in_output=include, skip_special_tokens=False)
    delta = Detokenizer(TOKENIZER, sampling, PROMPT).push([*TOKENIZER.encode("ab"), EOS], True, stop_token=True)
    assert delta == TextDelta("ab<|im_end|>" if include else "ab", 3, None)


def test_special_tokens() -> None:
    ids = [*TOKENIZER.encode("a"), EOS, *TOKENIZER.encode("b")]
    assert "".join(push_all(ids, [1], params())[0]) == "ab"
    assert "".join(push_all(ids, [1], params(skip_special_tokens=False))[0]) == "a<|im_end|>b"


def test_without_detokenizing_nothing_is_text() -> None:
    delta = Detokenizer(TOKENIZER, params(detokenize=False, stop=("a",)), PROMPT).push(TOKENIZER.encode("aaa"), True)
    assert delta == TextDelta("", 3, None)
