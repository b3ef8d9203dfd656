"""A tokenizer from a GGUF's metadata: byte-level BPE, split into words as the model was trained to expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from kllm.hub.gguf import GGUFFile
from kllm.hub.source import ModelSourceError

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> Any:
    split = pre_tokenizers.Split(Regex(_WORDS.replace("{DIGITS}", digits)), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


class Splitting(msgspec.Struct, frozen=True):
    """What `tokenizer.ggml.pre` stands for. whole_words: a word in the vocabulary is one token, merges or not."""

    pre_tokenizer: Callable[[], Any]
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_SPLITTINGS = {
    "gpt-2": Splitting(_gpt2),
    "smollm": Splitting(_single_digits),
    "llama-bpe": Splitting(lambda: _words("{1,3}"), whole_words=True, adds_bos=True),
    "qwen2": Splitting(lambda: _words(""), nfc=True),
}
_ALIASES = {"gpt2": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}


def build_backend(file: GGUFFile) -> Tokenizer:
    """The tokenizer that a GGUF describes. Raises ModelSourceError for kinds other than byte-level BPE, for an unknown
    way of splitting words, and for a vocabulary that does not hang together."""
    kind = file.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ModelSourceError(f"{file.path}: tokenizer {kind!r} is not supported, only gpt2 (byte-level BPE)")
    pre = file.get("tokenizer.ggml.pre", str)
    splitting = _SPLITTINGS.get(_ALIASES.get(pre, pre))
    if splitting is None:
        known = ", ".join(_SPLITTINGS)
        raise ModelSourceError(f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported, known are {known}")
    tokens = file.strings("tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type", tuple)
    if len(types) != len(tokens):
        raise ModelSourceError(
            f"{file.path}: {len(tokens)} tokens but {len(types)} entries in tokenizer.ggml.token_type"
        )
    backend = Tokenizer(_bpe(file, tokens, splitting.whole_words))
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splitting.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    special = (
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _CONTROL
    )
    backend.add_special_tokens(list(special))
    user = (AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED)
    backend.add_tokens(list(user))
    backend.post_processor = _post_processor(file, tokens, splitting.adds_bos)
    return backend


def _bpe(file: GGUFFile, tokens: list[str], whole_words: bool) -> BPE:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelSourceError(f"{file.path}: tokenizer.ggml.tokens has duplicates")
    merges = []
    for merge in file.strings("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space or left + right not in vocabulary or left not in vocabulary or right not in vocabulary:
            raise ModelSourceError(f"{file.path}: merge {merge!r:.80} is not of tokens in the vocabulary")
        merges.append((left, right))
    return BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words)


def _post_processor(file: GGUFFile, tokens: list[str], adds_bos: bool) -> Any:
    """BOS before and EOS after a text, if the file wants them."""
    before = _edge_token(file, tokens, "bos", adds_bos)
    after = _edge_token(file, tokens, "eos", False)
    edges = [token for token in (before, after) if token is not None]
    if not edges:
        return processors.ByteLevel(trim_offsets=False)
    pieces = [None if before is None else before[0], "$A", None if after is None else after[0]]
    return processors.TemplateProcessing(single=[p for p in pieces if p is not None], special_tokens=edges)


def _edge_token(file: GGUFFile, tokens: list[str], kind: str, default: bool) -> tuple[str, int] | None:
    if not file.get(f"tokenizer.ggml.add_{kind}_token", bool, default):
        return None
    key = f"tokenizer.ggml.{kind}_token_id"
    token = file.get(key, int)
    if not 0 <= token < len(tokens):
        raise ModelSourceError(f"{file.path}: metadata key {key} is {token}, which is not in the vocabulary")
    return tokens[token], token
