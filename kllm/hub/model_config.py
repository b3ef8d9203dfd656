"""A model's config in one form, whatever its files look like: Hugging Face's keys, RoPE under `rope_parameters`.

Reads config.json (old and new style) or a GGUF's metadata; never imports torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kllm.hub.gguf import GGUFFile
from kllm.hub.gguf_config import translate_config
from kllm.hub.source import ModelSource, ModelSourceError

_DEFAULT_ROPE_THETA = 10000.0
_SCALED_ROPE_TYPES = ("llama3", "yarn", "longrope")  # these need to know the length before scaling
_MAX_JSON_BYTES = 64 << 20


def read_config(source: ModelSource) -> dict[str, Any]:
    """The normalised config. Raises ModelSourceError naming the file and key that is missing or wrong."""
    if source.kind == "gguf":
        return translate_config(GGUFFile(source.path))
    path = source.path / "config.json"
    config = read_json(path)
    if config is None:
        raise ModelSourceError(f"{path}: missing")
    if not isinstance(config.get("model_type"), str):
        raise ModelSourceError(f"{path}: has no model_type")
    try:
        return normalise_config(config)
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelSourceError(f"{path}: invalid RoPE settings ({error})") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None if there is no such file. Raises ModelSourceError for anything but an object."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelSourceError(f"{path}: larger than {_MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelSourceError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelSourceError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelSourceError(f"{path}: must hold a JSON object")
    return value


def normalise_config(config: dict[str, Any]) -> dict[str, Any]:
    """A copy in the new style: `dtype` for torch_dtype; rope_theta, rope_scaling {"type"} and partial_rotary_factor
    become rope_parameters {"rope_type", "rope_theta", ...} (one per kind of layer if the config has several)."""
    config = dict(config)
    dtype = config.pop("torch_dtype", None)
    if dtype is not None and config.get("dtype") is None:  # null: not said
        config["dtype"] = dtype
    theta = config.pop("rope_theta", None)
    scaling = config.pop("rope_scaling", None)
    parameters = dict(config.get("rope_parameters") or scaling or {})
    kinds = [key for key, value in parameters.items() if isinstance(value, dict)]
    if kinds:
        config["rope_parameters"] = {**parameters, **{k: _one_rope(parameters[k], theta, config) for k in kinds}}
    else:
        config["rope_parameters"] = _one_rope(parameters, theta, config)
    return config


def _one_rope(parameters: dict[str, Any], theta: float | None, config: dict[str, Any]) -> dict[str, Any]:
    rope = dict(parameters)
    legacy_type = rope.pop("type", None)
    rope.setdefault("rope_type", legacy_type or "default")
    if rope["rope_type"] == "su":  # an early name
        rope["rope_type"] = "longrope"
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = _DEFAULT_ROPE_THETA if theta is None else theta
    rope["rope_theta"] = float(rope["rope_theta"])
    partial = config.get("partial_rotary_factor")
    if partial is not None:
        rope.setdefault("partial_rotary_factor", partial)
    if rope["rope_type"] in _SCALED_ROPE_TYPES:
        original = config.get("original_max_position_embeddings")
        if original is not None:
            rope["original_max_position_embeddings"] = original
        else:
            rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return rope
