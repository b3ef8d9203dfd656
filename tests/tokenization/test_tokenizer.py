from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.real_models import smollm2_or_skip
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from tokenizers import Tokenizer as Backend

from kllm.hub.source import ModelSource, ModelSourceError
from kllm.request import InvalidRequest
from kllm.tokenization.tokenizer import Tokenizer, load_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "smollm2_golden.json").read_text())


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(smollm2_or_skip())


@pytest.fixture
def folder(tiny_llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_folder, tmp_path / "model"))


def from_folder(folder: Path) -> Tokenizer:
    return load_tokenizer(ModelSource("tiny", "folder", folder))


def from_gguf(tmp_path: Path, **changes) -> Tokenizer:
    path = write_tiny_gguf(tmp_path / "m.gguf", **changes)
    return load_tokenizer(ModelSource("tiny", "gguf", path))


def change(path: Path, **values: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **values}))


@pytest.mark.parametrize("case", GOLDEN["encodings"], ids=lambda case: repr(case["text"][:20]))
def test_smollm2_equals_transformers(smollm2, case):
    assert smollm2.encode(case["text"]) == case["ids"]
    assert smollm2.decode(case["ids"]) == case["decoded"]


def test_smollm2_facts(smollm2):
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_ids) == (1, (2,))
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.chat_template.startswith("{% for message in messages %}")


def test_smollm2_json_makes_the_same_tokenizer(smollm2):
    again = Backend.from_str(smollm2.to_json())
    for case in GOLDEN["encodings"]:
        assert again.encode(case["text"]).ids == case["ids"]


@pytest.mark.parametrize("unit", ["word 12 and, ", "a", " ", "\n", "1", "日本語"])
def test_a_million_characters_take_seconds_at_most(smollm2, unit):
    text = (unit * (1_000_000 // len(unit) + 1))[:1_000_000]
    start = time.perf_counter()
    ids = smollm2.encode(text)
    assert time.perf_counter() - start < 20  # about 0.5 to 3 s; what is excluded is quadratic growth
    assert smollm2.decode(ids) == text


def test_folder_facts(tiny_llama_folder):
    tokenizer = from_folder(tiny_llama_folder)
    backend = tiny_tokenizer()
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.eos_token_ids == (backend.token_to_id("<|im_end|>"),)
    assert tokenizer.bos_token_id == backend.token_to_id("<|im_start|>")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    text = "the wind and <|im_start|>123 é"
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == "the wind and 123 é"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_folder_and_gguf_of_one_model_agree(tiny_llama_folder, tmp_path):
    a, b = from_folder(tiny_llama_folder), from_gguf(tmp_path)
    for text in ("the other one, 1234\n", "<|im_start|>an and", "日本 \t x"):
        assert a.encode(text) == b.encode(text)
    assert (a.eos_token_ids, a.bos_token_id, a.special_ids) == (b.eos_token_ids, b.bos_token_id, b.special_ids)
    assert (a.chat_template, a.bos_token, a.eos_token) == (b.chat_template, b.bos_token, b.eos_token)


def test_eos_ids_are_the_union_of_what_the_files_say(folder):
    change(folder / "config.json", eos_token_id=[5, 6])
    change(folder / "generation_config.json", eos_token_id=7)
    change(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>", "special": True})
    eos = tiny_tokenizer().token_to_id("<|endoftext|>")
    assert from_folder(folder).eos_token_ids == tuple(sorted([5, 6, 7, eos]))


def test_special_tokens_map_is_a_fallback(folder):
    (folder / "tokenizer_config.json").unlink()
    change(folder / "special_tokens_map.json", eos_token="<|endoftext|>", bos_token="<|im_end|>")
    tokenizer = from_folder(folder)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|endoftext|>", "<|im_end|>")


def test_chat_template_from_each_place(folder):
    change(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": "listed"}])
    assert from_folder(folder).chat_template == "listed"
    change(folder / "chat_template.json", chat_template="separate")
    assert from_folder(folder).chat_template == "separate"
    (folder / "chat_template.jinja").write_text("jinja")
    assert from_folder(folder).chat_template == "jinja"


def test_truncation_and_padding_saved_in_the_file_are_off(folder):
    backend = tiny_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert from_folder(folder).encode("the wind and the rain") == tiny_tokenizer().encode("the wind and the rain").ids


def test_token_str_and_bytes(tiny_llama_folder):
    tokenizer = from_folder(tiny_llama_folder)
    text = "the wind é\n日 <|im_end|>"
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == text
    assert "Ġthe" in {tokenizer.token_str(token) for token in tokenizer.encode("on the")}
    assert tokenizer.token_str(100_000) == ""
    assert tokenizer.token_bytes(100_000) == b""


def test_ids_beyond_the_vocabulary_decode_to_nothing(tiny_llama_folder):
    assert from_folder(tiny_llama_folder).decode([280, 287]) == ""


@pytest.mark.parametrize("ids", [[-1], [2**32], [2**70]])
def test_impossible_ids_are_refused(tiny_llama_folder, ids):
    with pytest.raises(InvalidRequest) as error:
        from_folder(tiny_llama_folder).decode(ids)
    assert error.value.param == "tokens"


def test_lone_surrogates_are_refused(tiny_llama_folder):
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        from_folder(tiny_llama_folder).encode("\ud800")


def test_gguf_adds_bos_and_eos_where_it_says_so(tmp_path):
    tokenizer = from_gguf(
        tmp_path, metadata={"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    )
    plain = tiny_tokenizer().encode("the").ids
    assert tokenizer.encode("the") == [tokenizer.bos_token_id, *plain, *tokenizer.eos_token_ids]
    assert tokenizer.encode("the", add_special_tokens=False) == plain


def test_gguf_end_of_turn_ends_too(tmp_path):
    eot = tiny_tokenizer().token_to_id("<|endoftext|>")
    tokenizer = from_gguf(tmp_path, metadata={"tokenizer.ggml.eot_token_id": eot})
    assert tokenizer.eos_token_ids == tuple(sorted([eot, tiny_tokenizer().token_to_id("<|im_end|>")]))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["it", "'s", "Ġ", "Ġ1234", "Ċ", "Ċ", "x", "Ġ!", "Ċ"]),
        ("smollm", ["it", "'s", "ĠĠ", "1", "2", "3", "4", "Ċ", "Ċ", "x", "Ġ!", "Ċ"]),
        ("llama-bpe", ["it", "'s", "Ġ", "Ġ", "123", "4", "ĊĊ", "x", "Ġ!Ċ"]),
        ("qwen2", ["it", "'s", "Ġ", "Ġ", "1", "2", "3", "4", "ĊĊ", "x", "Ġ!Ċ"]),
    ],
)
def test_words_are_split_as_the_models_were_trained(tmp_path, pre, pieces):
    splitter = from_gguf(tmp_path, pre=pre).backend.pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str("it's  1234\n\nx !\n")] == pieces


WRONG_GGUF = {
    "sentencepiece": ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama' is not supported"),
    "unknown splitting": ({"tokenizer.ggml.pre": "tekken"}, "'tekken' is not supported, known are gpt-2, smollm"),
    "types do not match": ({"tokenizer.ggml.token_type": [1, 1]}, "271 tokens but 2 entries"),
    "merge of unknown tokens": ({"tokenizer.ggml.merges": ["zz yy"]}, "merge 'zz yy' is not of tokens"),
    "merge without a space": ({"tokenizer.ggml.merges": ["th"]}, "merge 'th' is not of tokens"),
    "EOS out of range": ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999"),
    "tokens a number": ({"tokenizer.ggml.tokens": 3}, "tokenizer.ggml.tokens is 3"),
    "duplicate tokens": (
        {"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]},
        "tokenizer.ggml.tokens has duplicates",
    ),
}


@pytest.mark.parametrize("case", WRONG_GGUF)
def test_wrong_gguf_vocabulary_is_refused_by_name(tmp_path, case):
    metadata, message = WRONG_GGUF[case]
    with pytest.raises(ModelSourceError) as error:
        from_gguf(tmp_path, metadata=metadata)
    assert str(error.value).startswith(f"{tmp_path / 'm.gguf'}: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", "{}"), ("tokenizer.json", "nonsense"), ("tokenizer_config.json", "[]")],
)
def test_broken_files_are_named(folder, name, content):
    (folder / name).write_text(content)
    with pytest.raises(ModelSourceError, match=name):
        from_folder(folder)


def test_missing_tokenizer_json_is_named(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelSourceError, match=r"tokenizer\.json: missing"):
        from_folder(folder)


def test_importing_is_cheap():
    """Neither torch nor any other heavy package comes with finding a model and its tokenizer."""
    code = (
        "import kllm.hub, kllm.tokenization.tokenizer, kllm.tokenization.chat_template, sys;"
        "print(sorted({'torch', 'numpy', 'transformers', 'huggingface_hub', 'rich'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
