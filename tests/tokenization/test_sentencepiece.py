"""Tokenizers in SentencePiece's manner: blanks written ▁, bytes written <0xE4>."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import tiny_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from kllm.request import SamplingParams, TokenLogprobs
from kllm.server.logprobs import TokenTexts, chat_logprobs, completion_logprobs
from kllm.tokenization.detokenizer import Detokenizer
from kllm.tokenization.tokenizer import Tokenizer

WORDS = ["▁", "a", "b", "▁a", "▁Hello", "▁world", "你", "▁你"]
LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
METASPACE = decoders.Metaspace()
DECODERS = {"llama": LLAMA, "gemma": GEMMA, "metaspace": METASPACE}


def make(decoder: object) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, bos_token_id=1, eos_token_ids=[2], eos_token="</s>")


def ids(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """Pieces of the vocabulary; `E4` is the byte."""
    vocab = tokenizer.backend.get_vocab()
    return [vocab[piece] if piece in vocab else vocab[f"<0x{piece}>"] for piece in pieces]


@pytest.mark.parametrize("name", DECODERS)
def test_a_token_shows_its_blank(name: str) -> None:
    texts = TokenTexts(make(DECODERS[name]))
    hello, blank, letter, bos = ids(make(LLAMA), "▁Hello", "▁", "a", "<s>")
    assert [texts.text(token) for token in (hello, blank, letter, bos, 10_000)] == [" Hello", " ", "a", "<s>", ""]
    assert [bytes(texts.bytes(token)) for token in (hello, blank, letter)] == [b" Hello", b" ", b"a"]


@pytest.mark.parametrize("decoder", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_a_byte_is_that_byte(decoder: object) -> None:
    texts = TokenTexts(make(decoder))
    tokens = ids(make(decoder), "E4", "BD", "A0", "0A")
    assert [texts.text(token) for token in tokens] == ["\ufffd", "\ufffd", "\ufffd", "\n"]
    assert [texts.bytes(token) for token in tokens] == [[0xE4], [0xBD], [0xA0], [0x0A]]


def test_logprobs_join_to_the_text() -> None:
    tokenizer = make(LLAMA)
    output = ids(tokenizer, "▁Hello", "▁world", "▁你", "E5", "A5", "BD")
    texts = TokenTexts(tokenizer)
    text = tokenizer.decode([*ids(tokenizer, "a"), *output])[1:]  # behind a prompt
    entries = [TokenLogprobs(token, -1.0, 1, ()) for token in output]
    content = chat_logprobs(texts, entries, 0)["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == text == " Hello world 你好"
    shown = completion_logprobs(texts, entries, output, 0, 0)
    offsets = shown["text_offset"][:4]
    assert offsets == [0, text.index(" world"), text.index(" 你"), text.index("好")]


def test_alternatives_that_differ_by_a_blank_are_two() -> None:
    tokenizer = make(LLAMA)
    plain, behind_blank = ids(tokenizer, "a", "▁a")
    entry = TokenLogprobs(plain, -1.0, 1, ((plain, -1.0), (behind_blank, -2.0)))
    [top] = completion_logprobs(TokenTexts(tokenizer), [entry], [plain], 2, 0)["top_logprobs"]
    assert top == {"a": -1.0, " a": -2.0}


def test_byte_level_tokens_are_as_they_were() -> None:
    backend = tiny_tokenizer()
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=[0])
    for token in range(backend.get_vocab_size() + 2):
        assert tokenizer.token_text(token) == backend.decode([token], skip_special_tokens=False)


def streamed(tokenizer: Tokenizer, output: list[int], prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, SamplingParams(), prompt)
    return [detokenizer.push([token], finished=at == len(output)).text for at, token in enumerate(output, 1)]


def test_text_behind_a_broken_character_is_not_lost() -> None:
    tokenizer = make(LLAMA)
    prompt = ids(tokenizer, "<s>", "▁Hello")
    output = ids(tokenizer, "E4", "BD", "A0", "E5", "a", "b")
    assert streamed(tokenizer, output, prompt) == ["", "", "你", "", "\ufffda", "b"]
    assert tokenizer.decode([*prompt, *output]) == "Hello你\ufffdab"


@pytest.mark.parametrize("broken", [["E4", "BD"], ["A0"], ["F0", "9F", "98"], ["ED", "A0", "80"], ["FF", "FE"]])
def test_broken_bytes_alone_decode_as_in_the_library(broken: list[str]) -> None:
    tokenizer = make(LLAMA)
    tokens = ids(tokenizer, "▁Hello", *broken, "▁world", "<0x0A>", "</s>")
    assert tokenizer.decode(tokens) == "Hello" + "\ufffd" * len(broken) + " world\n"
    for skip in (True, False):
        assert tokenizer.decode([*tokens, 10_000], skip) == tokenizer.backend.decode(tokens, skip_special_tokens=skip)


BYTES = st.sampled_from([*"👋你é\n".encode(), 0xE4, 0xA0, 0xF0, 0xFF]).map(lambda byte: f"<0x{byte:02X}>")
PIECES = st.lists(BYTES | st.sampled_from([*WORDS, "</s>"]), max_size=40) | st.lists(BYTES, max_size=80)
CHARACTERS = st.text(alphabet="👋你é", max_size=30).map(lambda text: [f"<0x{byte:02X}>" for byte in text.encode()])


@pytest.mark.parametrize("decoder", [LLAMA, GEMMA], ids=["llama", "gemma"])
@settings(max_examples=300, deadline=None)
@given(PIECES, PIECES | CHARACTERS)
def test_the_stream_is_the_decoding_of_all(decoder: object, before: list[str], pieces: list[str]) -> None:
    tokenizer = make(decoder)
    prompt, output = ids(tokenizer, *before, "a"), ids(tokenizer, *pieces)
    whole = tokenizer.decode([*prompt, *output])
    assert "".join(streamed(tokenizer, output, prompt)) == whole[len(tokenizer.decode(prompt)) :]


def test_whole_characters_of_bytes_are_streamed_at_once() -> None:
    tokenizer = make(LLAMA)
    output = ids(tokenizer, *(f"<0x{byte:02X}>" for byte in ("你" * 30).encode()))
    assert streamed(tokenizer, output, ids(tokenizer, "a")) == ["", "", "你"] * 30


def test_broken_bytes_without_end_decode_in_time() -> None:
    tokenizer = make(LLAMA)
    output = ids(tokenizer, *["A0", "E4"] * 50_000)
    assert tokenizer.decode(output) == "\ufffd" * 100_000
