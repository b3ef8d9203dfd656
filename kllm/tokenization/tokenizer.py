"""Text to token ids and back: the tokenizer of a model folder or a GGUF file. Never imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from kllm.hub.gguf import GGUFFile
from kllm.hub.model_config import read_json
from kllm.hub.source import ModelSource, ModelSourceError
from kllm.request import InvalidRequest
from kllm.tokenization.gguf_vocabulary import build_backend
from kllm.tokenization.sentencepiece import REPLACEMENT, PieceDecoder

# Every call encodes one text: the library's threads, which share out several, would only have to be waited for.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Immutable once made, and safe to use from several threads; encoding releases the GIL.

    backend: the tokenizers library's object, for its DecodeStream.
    eos_token_ids: every id that ends an answer, as the model's config, generation config and tokenizer say, sorted.
    special_ids: ids of all special tokens. chat_template: Jinja text, None if the model has none.
    bos_token, eos_token: their text, "" if there is none (chat templates use them).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
        eos_token: str = "",
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()  # some tokenizer.json were saved with either switched on
        backend.no_padding()
        self.backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = bos_token_id
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(set(eos_token_ids)))
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.bos_token: str = "" if bos_token_id is None else (backend.id_to_token(bos_token_id) or "")
        self.eos_token = eos_token
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of text; special tokens spelt out in it are recognised. add_special_tokens: what the model's
        tokenizer puts around a text, such as BOS. Raises InvalidRequest for text with lone surrogates."""
        try:
            # The batch call is the one that does not work out character offsets: 2 times faster.
            [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("the text is not valid Unicode (it has unpaired surrogates)", "prompt") from error
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Ids that the tokenizer does not know (padding of the vocabulary) give nothing; bytes that
        are not UTF-8 give U+FFFD. Raises InvalidRequest for ids that are negative or beyond 32 bits."""
        try:
            text = str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))
        except OverflowError as error:
            raise InvalidRequest("token ids must be between 0 and the size of the vocabulary", "tokens") from error
        if self._pieces is not None and self._pieces.byte_fallback and REPLACEMENT in text:
            skipped = self.special_ids if skip_special_tokens else frozenset()
            pieces = (self.backend.id_to_token(token) for token in ids if token not in skipped)
            known = (piece for piece in pieces if piece is not None)
            return str(self.backend.decoder.decode(self._pieces.marked(known)))
        return text

    def token_str(self, token_id: int) -> str:
        """The vocabulary's own spelling, such as "Ġhello" (a leading space); "" for an unknown id."""
        return self.backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; those of several tokens together are UTF-8, those of one need not be."""
        piece = self.token_str(token_id)
        if self._pieces is not None:
            return self._pieces.bytes_of(piece)
        if self._byte_level and token_id not in self._added_ids and all(char in _BYTE_OF_CHAR for char in piece):
            return bytes(_BYTE_OF_CHAR[char] for char in piece)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """The text a token adds to what is before it, with the blank at its start; U+FFFD for parts of characters."""
        if self._pieces is not None:
            return self.token_bytes(token_id).decode(errors="replace")
        return self.decode([token_id], skip_special_tokens=False)

    def to_json(self) -> str:
        """As the text of a tokenizer.json, which is how other libraries read a tokenizer. Takes some 40 ms."""
        return str(self.backend.to_str())

    @cached_property
    def _pieces(self) -> PieceDecoder | None:
        return PieceDecoder.of(self.backend)

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in repr(self.backend.decoder)

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a model. Raises ModelSourceError naming the file that is missing, broken or not supported."""
    if source.kind == "gguf":
        return _from_gguf(GGUFFile(source.path))
    return _from_folder(source.path)


def _from_gguf(file: GGUFFile) -> Tokenizer:
    backend = build_backend(file)
    bos, eos, eot = (_gguf_id(file, kind, backend) for kind in ("bos", "eos", "eot"))
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=[token for token in (eos, eot) if token is not None],
        eos_token=(backend.id_to_token(eos) or "") if eos is not None else "",
        chat_template=template if isinstance(template, str) else None,
    )


def _gguf_id(file: GGUFFile, kind: str, backend: Backend) -> int | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    if key not in file.metadata:
        return None
    token = file.get(key, int)
    if backend.id_to_token(token) is None:
        raise ModelSourceError(f"{file.path}: metadata key {key} is {token}, which is not in the vocabulary")
    return token


def _from_folder(folder: Path) -> Tokenizer:
    backend = _read_backend(folder / "tokenizer.json")
    settings = read_json(folder / "tokenizer_config.json") or {}
    names = {**(read_json(folder / "special_tokens_map.json") or {}), **settings}
    config = read_json(folder / "config.json") or {}
    generation = read_json(folder / "generation_config.json") or {}
    bos_token, eos_token = _token_text(names.get("bos_token")), _token_text(names.get("eos_token"))
    eos_ids = {*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
    if eos_token and (token := backend.token_to_id(eos_token)) is not None:
        eos_ids.add(token)
    if not eos_token and eos_ids:
        eos_token = backend.id_to_token(min(eos_ids)) or ""
    bos_id = backend.token_to_id(bos_token) if bos_token else None
    if bos_id is None:
        bos_id = next(iter(_ids(config.get("bos_token_id"))), None)
    return Tokenizer(
        backend,
        bos_token_id=bos_id,
        eos_token_ids=eos_ids,
        eos_token=eos_token,
        chat_template=_read_chat_template(folder, settings),
    )


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_buffer(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelSourceError(f"{path}: missing; tokenizers without a tokenizer.json are not supported") from error
    except Exception as error:  # the library raises plain Exception, and ValueError, for what it cannot read
        raise ModelSourceError(f"{path}: not a valid tokenizer ({error})") from error


def _read_chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """From chat_template.jinja, chat_template.json or tokenizer_config.json, the first that is there."""
    jinja = folder / "chat_template.jinja"
    try:
        if jinja.exists():
            return jinja.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelSourceError(f"{jinja}: cannot be read ({error})") from error
    separate = read_json(folder / "chat_template.json") or {}
    template = separate.get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):  # several, each with a name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: object) -> str:
    """A special token's text: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _ids(value: object) -> list[int]:
    """A token id or a list of them, as config files have both."""
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool) and token >= 0]


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return table


_BYTE_OF_CHAR = _byte_of_char()
assert _BYTE_OF_CHAR.keys() == set(pre_tokenizers.ByteLevel.alphabet())
