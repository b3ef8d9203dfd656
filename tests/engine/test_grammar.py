"""Structured output on a small byte-level tokenizer: random walks along the masks, refusals, replay."""

from __future__ import annotations

import json
import random
import re
import threading
import time

import numpy as np
import pytest
from support.tiny_models import tiny_tokenizer

from kllm.engine import grammar as module
from kllm.engine.grammar import GrammarCompiler, GrammarMatcher, check_structured_outputs
from kllm.request import InvalidRequest, StructuredOutputs

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.token_to_id("<|im_end|>")
VOCAB = 288  # more than the tokenizer has
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"oneOf": [{"const": "a"}, {"enum": ["bé", 7, None]}]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHOICES = ("yes", "yes!", 'say "no"', "a|b", "line\nbreak", "ünïcode 🙂", "back\\slash/", "(x)", " ")
LARK = """
start: sum
sum: term (("+" | "-") term)*
term: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,3}/
"""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.to_str(), VOCAB, [EOS])


def allowed(matcher: GrammarMatcher) -> list[int]:
    mask = matcher.mask()
    assert len(mask) == 4 * -(-VOCAB // 32)
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def walk(matcher: GrammarMatcher, rng: random.Random, longest: int = 400) -> tuple[list[int], bool]:
    """Random allowed tokens. Returns them without the end token, and whether the end came."""
    tokens: list[int] = []
    while len(tokens) < longest:
        choices = allowed(matcher)
        assert choices
        assert max(choices) < TOKENIZER.get_vocab_size()
        # The end as soon as it may come in half of the cases; closing characters often enough to get there.
        closing = [t for t in choices if TOKENIZER.decode([t]).strip()[:1] in ('"', "}", "]", ")")]
        token = (
            EOS
            if EOS in choices and rng.random() < 0.5
            else rng.choice(closing if closing and rng.random() < 0.4 else choices)
        )
        assert matcher.accept(token)
        if token == EOS:
            return tokens, True
        tokens.append(token)
    return tokens, False


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() <= PERSON["properties"].keys()
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and value.get("kind", "a") in ("a", "bé", 7, None)
        and all(type(tag) is bool for tag in value.get("tags", []))
        and len(value.get("tags", [])) <= 3
    )


def is_sum(text: str) -> bool:
    while (reduced := re.sub(r"\(\d+([+-]\d+)*\)", "0", text)) != text:
        text = reduced
    return re.fullmatch(r"\d+([+-]\d+)*", text) is not None


CASES = {
    "json_object": (StructuredOutputs(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    "json": (StructuredOutputs(json=json.dumps(PERSON)), is_person),
    "regex": (
        StructuredOutputs(regex=r"[a-z]{2,5}@(foo|bär)\.(com|org)/?"),
        lambda text: re.fullmatch(r"[a-z]{2,5}@(foo|bär)\.(com|org)/?", text),
    ),
    "choice": (StructuredOutputs(choice=CHOICES), lambda text: text in CHOICES),
    "grammar": (StructuredOutputs(grammar=LARK), is_sum),
}


@pytest.mark.parametrize("name", CASES)
def test_walks_along_the_masks_give_valid_output(compiler, name):
    spec, is_valid = CASES[name]
    rng = random.Random(name)
    ended = []
    for _ in range(25):
        tokens, end = walk(compiler.compile(spec).matcher(), rng)
        if end:
            text = TOKENIZER.decode(tokens, skip_special_tokens=False)
            assert is_valid(text), text
            ended.append(text)
    assert len(ended) >= 10
    assert len(set(ended)) >= 3


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_can_be_said(compiler, choice):
    matcher = compiler.compile(CASES["choice"][0]).matcher()
    assert matcher.replay([*TOKENIZER.encode(choice, add_special_tokens=False).ids, EOS])


def test_only_the_end_follows_a_complete_grammar(compiler):
    matcher = compiler.compile(StructuredOutputs(regex="ab")).matcher()
    assert matcher.replay(TOKENIZER.encode("ab").ids)
    assert matcher.terminated
    assert matcher.accepting
    for _ in range(3):  # with ignore_eos the end may come again and again
        assert allowed(matcher) == [EOS]
        assert matcher.accept(EOS)
    assert not matcher.accept(TOKENIZER.encode("a").ids[0])
    assert matcher.error is None


def test_a_token_that_is_not_allowed_is_refused_and_changes_nothing(compiler):
    a, b, c = (TOKENIZER.encode(letter).ids[0] for letter in "abc")
    matcher = compiler.compile(StructuredOutputs(regex="ab+")).matcher()
    for wrong in (b, c, EOS, VOCAB - 1, VOCAB + 1000):
        assert not matcher.accept(wrong)
    assert allowed(matcher) == [t for t in allowed(matcher) if TOKENIZER.decode([t]).startswith("a")]
    assert matcher.accept(a)
    assert not matcher.accept(a)
    assert matcher.accept(b)
    assert matcher.accepting
    assert not matcher.terminated
    assert matcher.accept(EOS)


@pytest.mark.parametrize("name", CASES)
def test_replay_gives_the_same_masks(compiler, name):
    rng = random.Random(1)
    grammar = compiler.compile(CASES[name][0])
    tokens, end = walk(grammar.matcher(), rng, longest=60)
    tokens += [EOS] if end else []
    for split in range(0, len(tokens) + 1, 5):
        stepped, replayed = grammar.matcher(), grammar.matcher()
        for token in tokens[:split]:
            stepped.mask()
            assert stepped.accept(token)
        assert replayed.replay(tokens[:split])
        assert replayed.mask() == stepped.mask()
    assert not grammar.matcher().replay([*tokens[:1], VOCAB - 1])


@pytest.mark.parametrize("spec", [StructuredOutputs(json_object=True), StructuredOutputs(json='{"type": "object"}')])
def test_whitespace_in_json_has_an_end(compiler, spec):
    """Pretty JSON is allowed; a model that loves blanks must go on with something else."""
    pretty = json.dumps({"a": {"b": [1, {"c": "   x"}]}, "d": None}, indent=2)
    assert compiler.compile(spec).matcher().replay(TOKENIZER.encode(pretty).ids)
    matcher = compiler.compile(spec).matcher()
    blank = TOKENIZER.encode(" ").ids[0]
    assert matcher.replay([*TOKENIZER.encode("{").ids, *[blank] * module.MAX_WHITESPACE])
    assert not any(TOKENIZER.decode([token]).isspace() for token in allowed(matcher))


def test_several_ends_are_all_allowed():
    ends = [EOS, TOKENIZER.token_to_id("<|endoftext|>")]
    compiler = GrammarCompiler(TOKENIZER.to_str(), VOCAB, ends)
    for end in ends:
        matcher = compiler.compile(StructuredOutputs(regex="a")).matcher()
        assert matcher.accept(TOKENIZER.encode("a").ids[0])
        assert allowed(matcher) == sorted(ends)
        assert matcher.accept(end)


@pytest.mark.parametrize("vocab_size", [268, 271, 272, 288, 289, 320])
def test_masks_cover_just_the_vocabulary(vocab_size):
    compiler = GrammarCompiler(TOKENIZER.to_str(), vocab_size, [EOS])
    mask = compiler.compile(StructuredOutputs(regex="(?s:.*)")).matcher().mask()
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    assert len(bits) == 32 * -(-vocab_size // 32)
    assert not bits[vocab_size:].any()


# -- refusals ----------------------------------------------------------------------------------------------------


def nested(depth: int) -> str:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return json.dumps(schema)


def chained(n: int, link) -> str:
    definitions = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(n)} | {f"a{n}": {"type": "string"}}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": definitions})


def intersected(n: int) -> dict:
    return {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(n)]}


REFUSED = {
    "json not json": (StructuredOutputs(json='{"type": '), "not JSON"),
    "json list": (StructuredOutputs(json="[1]"), "must be an object"),
    "json unknown type": (StructuredOutputs(json='{"type": "strung"}'), "strung"),
    "json unsupported": (StructuredOutputs(json='{"not": {"type": "string"}}'), "not"),
    "json impossible": (StructuredOutputs(json='{"allOf": [{"type": "string"}, {"type": "null"}]}'), "Unsatisfiable"),
    "json false": (StructuredOutputs(json="false"), "must be an object"),
    "json endless": (StructuredOutputs(json='{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'), "nothing"),
    "json remote": (StructuredOutputs(json='{"$ref": "http://localhost/x.json"}'), "not present"),
    "json file": (StructuredOutputs(json='{"$ref": "file:///etc/passwd"}'), "not present"),
    "json deep": (StructuredOutputs(json=nested(70)), "nested more than 64 deep"),
    "json very deep": (StructuredOutputs(json="[" * 30_000 + "]" * 30_000), "nested more than 64 deep"),
    "json large": (StructuredOutputs(json=json.dumps({"enum": ["x" * 1000] * 100})), "larger than 65536 bytes"),
    "json many": (StructuredOutputs(json=json.dumps({"enum": [1] * 20_000})), "more than 10000 values"),
    "json wide": (
        StructuredOutputs(json=json.dumps({"properties": {f"p{i}": {} for i in range(1000)}})),
        "900 members",
    ),
    "json long pattern": (StructuredOutputs(json=json.dumps({"type": "string", "pattern": "a?" * 2500})), "4096"),
    "json intersections": (StructuredOutputs(json=json.dumps(intersected(30))), "intersect more than 8 patterns"),
    "json intersections by reference": (
        StructuredOutputs(json=chained(30, lambda ref: {"type": "string", "pattern": ".*a.{5}b.*", **ref})),
        "intersect more than 8 patterns",
    ),
    "json intersections inside": (
        StructuredOutputs(json=json.dumps({"properties": {"x": intersected(12)}})),
        "intersect more than 8 patterns",
    ),
    "json surrogate": (StructuredOutputs(json='{"const": "\ud800"}'), "Unicode"),
    "regex unclosed": (StructuredOutputs(regex="(a"), "unclosed group"),
    "regex look-around": (StructuredOutputs(regex="(?=a)b"), "look-around"),
    "regex nested": (StructuredOutputs(regex="(" * 3000 + "a" + ")" * 3000), "nested"),
    "regex large": (StructuredOutputs(regex="a" * 10_000), "larger than 8192 bytes"),
    "regex nothing": (StructuredOutputs(regex=r"[^\s\S]"), "nothing can match"),
    "regex surrogate": (StructuredOutputs(regex="\ud800"), "Unicode"),
    "grammar unknown name": (StructuredOutputs(grammar="start: foo"), "foo"),
    "grammar blank": (StructuredOutputs(grammar="  \n "), "grammar"),
    "grammar endless": (StructuredOutputs(grammar="start: start"), "nothing can match"),
    "grammar nested": (StructuredOutputs(grammar="start: " + "(" * 3000 + '"a"' + ")" * 3000), "nested"),
    "grammar large": (StructuredOutputs(grammar="start: " + '"a" ' * 5000), "larger than 16384 bytes"),
    "choice large": (StructuredOutputs(choice=tuple("x" * 1000 + str(i) for i in range(100))), "larger than"),
    "none": (StructuredOutputs(), "exactly one kind"),
    "two": (StructuredOutputs(regex="a", json_object=True), "exactly one kind"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_specifications_are_refused_clearly_and_soon(compiler, name):
    spec, message = REFUSED[name]
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match=re.escape(message)) as refused:
        compiler.compile(spec)
    assert time.monotonic() - started < 30  # well under 1 s; what is excluded is exponential growth
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 450
    assert refused.value.param == ("response_format" if name.startswith("json") else "structured_outputs")


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_check_at_the_edge_passes_what_compiles(name):
    check_structured_outputs(CASES[name][0])


@pytest.mark.parametrize("name", ["json unknown type", "json deep", "regex unclosed", "grammar unknown name", "two"])
def test_the_check_at_the_edge_refuses_without_a_tokenizer(name):
    spec, message = REFUSED[name]
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        check_structured_outputs(spec)


@pytest.mark.parametrize(
    "spec",
    [
        StructuredOutputs(json=chained(800, lambda ref: {"type": "object", "properties": {"x": ref}})),
        StructuredOutputs(json=chained(850, lambda ref: {"allOf": [ref]})),
        StructuredOutputs(grammar="start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(900)) + 'r900: "b"'),
    ],
)
def test_long_chains_of_references_do_not_overflow_the_stack(compiler, spec):
    check_structured_outputs(spec)
    assert allowed(compiler.compile(spec).matcher())


def test_a_grammar_that_grows_too_complex_fails_with_an_empty_mask(compiler):
    spec = StructuredOutputs(grammar='start: "x" ' + " ".join(["/a|b/?"] * 1500))
    matcher = compiler.compile(spec).matcher()
    tokens = [TOKENIZER.encode(letter).ids[0] for letter in "xabab"]
    for token in tokens:
        if not any(matcher.mask()) or not matcher.accept(token):
            break
    assert matcher.error is not None
    assert not any(matcher.mask())
    assert not matcher.accept(EOS)


def test_a_tokenizer_that_cannot_be_used_is_reported():
    with pytest.raises(InvalidRequest, match="not available with this model's tokenizer"):
        GrammarCompiler('{"model": 1}', VOCAB, [EOS]).compile(StructuredOutputs(regex="a"))
    with pytest.raises(InvalidRequest, match="not available with this model's tokenizer"):
        GrammarCompiler(TOKENIZER.to_str(), VOCAB, []).compile(StructuredOutputs(regex="a"))


# -- cache and threads -------------------------------------------------------------------------------------------


def test_the_cache_shares_grammars_and_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    compiler = GrammarCompiler(TOKENIZER.to_str(), VOCAB, [EOS])
    specs = [StructuredOutputs(regex=letter) for letter in "abc"]
    first = compiler.compile(specs[0])
    assert compiler.compile(StructuredOutputs(regex="a")) is first
    compiler.compile(specs[1])
    assert compiler.compile(specs[0]) is first  # used again, so b is the oldest now
    compiler.compile(specs[2])
    assert compiler.compile(specs[0]) is first
    compiler.compile(specs[1])
    compiler.compile(specs[2])
    assert compiler.compile(specs[0]) is not first


def test_many_threads_compile_and_mask_at_once():
    compiler = GrammarCompiler(TOKENIZER.to_str(), VOCAB, [EOS])
    start = threading.Barrier(8)
    results: dict[int, tuple] = {}

    def work(number: int) -> None:
        start.wait()
        grammar = compiler.compile(StructuredOutputs(json=json.dumps(PERSON)))
        try:
            compiler.compile(StructuredOutputs(regex="(a"))
        except InvalidRequest as error:
            results[number] = grammar, walk(grammar.matcher(), random.Random(3)), error.message

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len({id(grammar) for grammar, _, _ in results.values()}) == 1
    assert all(result[1:] == results[0][1:] for result in results.values())
