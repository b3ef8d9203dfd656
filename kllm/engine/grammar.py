"""Structured output: what a request must match becomes token masks, by llguidance. Torch-free.

    GrammarCompiler   one per instance; knows the tokenizer
      Grammar         one per distinct specification, cached
        GrammarMatcher  one per request; advanced once per committed token

A specification comes from a client. It is refused when it is too large or too deep, and llguidance's own
limits bound the work of compiling it and of every mask; none of this depends on the patience of the caller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from threading import Lock, Thread, stack_size
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kllm.request import InvalidRequest, StructuredOutputs

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

T = TypeVar("T")

# Bytes of each kind. Compiling is quadratic in the length of a regex, hence the small limits where there may be one.
MAX_BYTES = {"json": 64 * 1024, "choice": 64 * 1024, "grammar": 16 * 1024, "regex": 8 * 1024, "json_object": 0}
MAX_STRING = 4 * 1024  # characters of one string in a schema: it may be a pattern
MAX_DEPTH = 64  # of nested objects and arrays in a schema
MAX_NODES = 10_000  # values in a schema
MAX_MEMBERS = 900  # of one object in a schema: a mask costs time for every property that may come next
MAX_INTERSECTED = 8  # patterns that one string may have to match at once: their cost multiplies
MAX_WHITESPACE = 20  # characters in a row between the tokens of JSON: a line's end and nine levels of indentation
MAX_CACHED = 128  # compiled grammars

_LIMITS = LLParserLimits(
    max_items_in_row=4_000,  # about 4 for each property that may come next
    initial_lexer_fuel=200_000,  # about 50,000 a millisecond, once per grammar
    step_lexer_fuel=100_000,  # about 14,000 a millisecond, per mask
    step_max_items=20_000,
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=100_000,
    verbose_errors=False,
)
_JSON_DEFAULTS: JsonCompileOptions = {
    # oneOf is read as anyOf: a mask cannot tell that a second alternative would match as well.
    "coerce_one_of": True,
    # Without a limit, small models write blanks and line ends until they are cut off.
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}",
}
_OWN_ASSERTIONS = frozenset({"pattern", "format", "properties", "items", "prefixItems", "additionalProperties"})
# llguidance recurses along references, which no nesting limit bounds: 1,000 of them overflow an ordinary stack.
_COMPILE_STACK_BYTES = 256 * 2**20
_stack_size_lock = Lock()


def check_structured_outputs(spec: StructuredOutputs) -> None:
    """Raise InvalidRequest if `spec` is malformed, over a limit, or refused by llguidance whatever the tokenizer.

    For the edge, where a bad specification should be refused before anything waits for it.
    """
    source = _to_llguidance(spec)
    is_error, messages = _on_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(source, limits=_LIMITS))
    if is_error:
        raise _invalid(spec.key()[0], messages[0])


class GrammarCompiler:
    """Compiles specifications for one tokenizer. Every method may be called from any thread.

    tokenizer_json: the text of a tokenizer.json. vocab_size: columns of the model's logits, which may be
    more than the tokenizer has tokens (ids without a token are never allowed).
    The tokenizer is prepared for llguidance at the first compile(): about 0.3 s for 50,000 tokens.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = Lock()
        self._grammars: OrderedDict[tuple[str, str], Future[Grammar]] = OrderedDict()
        self._grammars_lock = Lock()

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """The grammar of `spec`, from the cache where it is there. Raises InvalidRequest.

        Threads that ask for the same one at the same time share one compilation.
        """
        key = spec.key()
        with self._grammars_lock:
            future = self._grammars.get(key)
            if future is not None:
                self._grammars.move_to_end(key)
            else:
                mine = self._grammars[key] = Future()
                if len(self._grammars) > MAX_CACHED:
                    self._grammars.popitem(last=False)
        if future is not None:
            return future.result()
        try:
            grammar = self._compile(spec)
        except BaseException as error:
            with self._grammars_lock:
                if self._grammars.get(key) is mine:
                    del self._grammars[key]
            mine.set_exception(error)
            raise
        mine.set_result(grammar)
        return grammar

    def _compile(self, spec: StructuredOutputs) -> Grammar:
        source = _to_llguidance(spec)
        tokenizer = self._ll_tokenizer()
        matcher = _on_deep_stack(lambda: LLMatcher(tokenizer, source, limits=_LIMITS, log_level=0))
        if not matcher.is_error():
            # Some grammars show only at the first mask that they are too complex or match nothing.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _invalid(spec.key()[0], matcher.get_error())
        return Grammar(matcher, self._vocab_size, self._eos_token_ids)

    def _ll_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = _load_tokenizer(self._tokenizer_json, self._vocab_size, self._eos_token_ids)
                except ValueError as error:
                    message = f"structured output is not available with this model's tokenizer: {error}"
                    raise InvalidRequest(message, "structured_outputs") from error
            return self._tokenizer


class Grammar:
    """A compiled specification. Immutable: matchers are copies of its state before the first token."""

    def __init__(self, initial: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._initial = initial
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._initial.deep_copy(), self._vocab_size, self._eos_token_ids)


class GrammarMatcher:
    """Where one request is in its grammar. Any thread may use it, but only one at a time; mask() releases the GIL.

    When the grammar is complete and nothing can follow, only end-of-sequence is allowed, again and again.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask_bytes = 4 * -(-vocab_size // 32)
        self._vocabulary = (1 << vocab_size) - 1
        self._eos_token_ids = eos_token_ids

    def mask(self) -> bytes:
        """Tokens allowed next: ceil(vocab_size / 32) little-endian 32-bit words, a set bit allows a token.

        All zero if the matcher has failed because the grammar became too complex on the way; the request
        cannot go on then, and `error` says why.
        """
        mask = int.from_bytes(self._matcher.compute_bitmask(), "little") & self._vocabulary
        return (0 if self._matcher.is_error() else mask).to_bytes(self._mask_bytes, "little")

    def accept(self, token: int) -> bool:
        """Advance by a token. False, with nothing changed, if the grammar does not allow it here."""
        if not 0 <= token < self._vocab_size:
            return False
        if self._matcher.is_stopped():
            return token in self._eos_token_ids and not self.error
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def replay(self, tokens: Iterable[int]) -> bool:
        """Advance by the output of an earlier attempt. False, at the first token that is not allowed."""
        return all(self.accept(token) for token in tokens)

    @property
    def terminated(self) -> bool:
        """Whether only end-of-sequence is allowed."""
        return bool(self._matcher.is_stopped())

    @property
    def accepting(self) -> bool:
        """Whether the output so far is a whole match."""
        return bool(self._matcher.is_accepting())

    @property
    def error(self) -> str | None:
        """Why the matcher cannot go on, or None."""
        return _reason(self._matcher.get_error()) if self._matcher.is_error() else None


def _load_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_token_ids)
    except ValueError as error:
        if "vocab size too small" not in str(error):
            raise
    # The tokenizer has more tokens than the model has logits; masks are cut to the latter.
    return LLTokenizer(tokenizer_json, eos_token=eos_token_ids)


def _to_llguidance(spec: StructuredOutputs) -> str:
    """The specification in llguidance's form, limits on size and depth checked. Raises InvalidRequest."""
    kind, text = spec.key()
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _invalid(kind, "it is not valid Unicode") from None
    if size > MAX_BYTES[kind]:
        raise _invalid(kind, f"it is larger than {MAX_BYTES[kind]} bytes")
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON_DEFAULTS)
    if kind == "json":
        _check_schema(text)
        return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_DEFAULTS)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(text)
    # One regex, because the parser is quadratic in the number of alternatives of a rule.
    return LLMatcher.grammar_from_regex("|".join(_literal(choice) for choice in spec.choice or ()))


def _literal(text: str) -> str:
    """A regex that matches just this text."""
    return "".join(c if c.isalnum() or not c.isascii() else f"\\x{ord(c):02X}" for c in text)


def _check_schema(text: str) -> None:
    try:
        schema = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise _invalid("json", f"it is not JSON ({error})") from None
    except RecursionError:
        raise _invalid("json", f"it is nested more than {MAX_DEPTH} deep") from None
    if not isinstance(schema, dict):
        raise _invalid("json", "a schema must be an object")
    nodes, depth, patterns, intersections, level = 0, 0, 0, 0, [schema]
    while level:
        nodes += len(level)
        depth += 1
        if nodes > MAX_NODES:
            raise _invalid("json", f"it has more than {MAX_NODES} values")
        if depth > MAX_DEPTH + 1:  # the values inside the deepest container are a level of their own
            raise _invalid("json", f"it is nested more than {MAX_DEPTH} deep")
        for node in level:
            _check_node(node)
            if isinstance(node, dict):
                patterns += ("pattern" in node) + ("format" in node)
                intersections += _intersections(node)
        level = [child for node in level for child in _children(node)]
    if min(patterns, intersections + 1) > MAX_INTERSECTED:
        raise _invalid("json", f"it may intersect more than {MAX_INTERSECTED} patterns")


def _intersections(node: dict[str, Any]) -> int:
    """How many schemas an instance of this one must match at once, less one."""
    all_of = node.get("allOf")
    parts = len(all_of) if isinstance(all_of, list) else 0
    parts += sum(key in node for key in ("$ref", "anyOf", "oneOf"))
    parts += not node.keys().isdisjoint(_OWN_ASSERTIONS)
    return max(0, parts - 1)


def _check_node(node: Any) -> None:
    if isinstance(node, dict) and len(node) > MAX_MEMBERS:
        raise _invalid("json", f"one of its objects has more than {MAX_MEMBERS} members")
    strings = node if isinstance(node, dict) else [node] if isinstance(node, str) else ()
    if any(len(string) > MAX_STRING for string in strings):
        raise _invalid("json", f"one of its strings is longer than {MAX_STRING} characters")


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _on_deep_stack(function: Callable[[], T]) -> T:
    """Run `function` in a thread with a stack for deep recursion (address space, not memory) and wait for it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # handed to the caller
            future.set_exception(error)

    thread = Thread(target=run, name="kllm-grammar", daemon=True)
    with _stack_size_lock:
        previous = stack_size(_COMPILE_STACK_BYTES)
        try:
            thread.start()
        finally:
            stack_size(previous)
    thread.join()
    return future.result()


def _invalid(kind: str, reason: str) -> InvalidRequest:
    name = {"json": "JSON schema", "json_object": "JSON object"}.get(kind, kind)
    param = "response_format" if kind in ("json", "json_object") else "structured_outputs"
    return InvalidRequest(f"the {name} cannot be used for structured output: {_reason(reason)}", param)


def _reason(message: str) -> str:
    """llguidance follows its messages with source excerpts and parser state; clients need neither."""
    if message.startswith("NoExtension"):
        return "nothing can match it"
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["unknown error"]
    # The regex parser quotes the whole expression first and says what is wrong with it below.
    line = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    return line if len(line) <= 300 else line[:300] + "…"
