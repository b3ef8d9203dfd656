"""The same weights in every engine's own format, made once from the GGUF file.

gguf               the file as it is (4 bits, for llama.cpp and kLLM)
folder             Hugging Face's, dequantised to bfloat16: config, safetensors, tokenizer
openvino-fp16/int8, ctranslate2-int8    converted from the folder by the engine's own tools, in its environment

All but the first lie in <cache>/models/<name of the GGUF>/, completed by a rename.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import Environments, SetupError, Tell
from kllm.hub.source import ModelSource, ModelSourceError

CONVERTERS = Path(__file__).parent / "converters"


class Models:
    """source: a GGUF file."""

    def __init__(self, source: ModelSource, environments: Environments) -> None:
        self._source = source
        self._environments = environments
        self._folder = environments.cache / "models" / source.path.stem

    def get(self, kind: str, tell: Tell) -> Path:
        """The model in a format, made if it is not there yet. Raises SetupError."""
        if kind == "gguf":
            return self._source.path
        if kind == "folder":
            return self._make(kind, lambda target: write_folder(self._source, target), tell)
        tool, _, weights = kind.partition("-")
        origin = self.get("folder", tell)

        def convert(target: Path) -> None:
            script = CONVERTERS / f"to_{tool}.py"
            self._environments.run(tool, script, [str(origin), str(target), weights], tell)

        return self._make(kind, convert, tell)

    def _make(self, kind: str, fill: Callable[[Path], None], tell: Tell) -> Path:
        final = self._folder / kind
        if final.exists():
            return final
        tell(f"{kind}: converting the model")
        partial = self._folder / f"partial-{kind}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        partial.rename(final)
        return final


def write_folder(source: ModelSource, target: Path) -> None:
    """A Hugging Face folder of a GGUF file, dequantised. Keys that changed their names are there in both forms, since
    the engines read them with different versions of transformers. Raises SetupError."""
    import torch
    from safetensors.torch import save_file

    from kllm.hub.gguf import GGUFFile
    from kllm.models.weights.gguf_file import GGUFCheckpoint, hugging_face_name
    from kllm.models.weights.interface import WeightError
    from kllm.tokenization.tokenizer import load_tokenizer

    try:
        file = GGUFFile(source.path)
        checkpoint = GGUFCheckpoint(file)
        names = {name: info.shape for gguf, info in file.tensors.items() if (name := hugging_face_name(gguf))}
        tensors = {name: checkpoint.get(name, shape, torch.bfloat16) for name, shape in names.items()}
        tokenizer = load_tokenizer(source)
    except (ModelSourceError, WeightError) as error:
        raise SetupError(str(error)) from error
    config = _both_spellings(checkpoint.config)
    ends = list(tokenizer.eos_token_ids)
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", {"eos_token_id": ends, "bos_token_id": tokenizer.bos_token_id})
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.bos_token or None,
            "eos_token": tokenizer.eos_token,
            "chat_template": tokenizer.chat_template,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    )
    (target / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})


def _both_spellings(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {**config, "torch_dtype": config["dtype"], "rope_theta": rope["rope_theta"]}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
