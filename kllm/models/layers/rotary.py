"""Rotary position embedding: frequencies of the scaling types in use, and tables of cosines and sines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kllm.kernels.operators import Rotation
from kllm.models.model_config import MAX_INT, ModelConfig


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """inv_freq float32 [D/2]: radians per position of each pair. amplitude: factor of cosines and sines.
    softmax_factor: factor of the attention scale that DeepSeek's MLA adds (1 unless YaRN with mscale_all_dim)."""

    inv_freq: torch.Tensor
    amplitude: float = 1.0
    softmax_factor: float = 1.0


class RotaryTable:
    """Cosines and sines of every position that the model is run for. dtype: of the activations.

    cos, sin: float32 [positions, size], see Rotation."""

    def __init__(self, scaling: RopeScaling, max_positions: int, dtype: torch.dtype, interleaved: bool) -> None:
        angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * scaling.inv_freq
        cos, sin = angles.cos() * scaling.amplitude, angles.sin() * scaling.amplitude
        if interleaved:
            self.cos = torch.stack((cos, cos), dim=-1).flatten(1)
            self.sin = torch.stack((-sin, sin), dim=-1).flatten(1)
        else:
            self.cos = torch.cat((cos, cos), dim=-1)
            self.sin = torch.cat((-sin, sin), dim=-1)
        self.interleaved = interleaved
        self._dtype = dtype

    def at(self, positions: torch.Tensor) -> Rotation:
        """Rotation of tokens at positions int64 [T]."""
        cos, sin = (table.index_select(0, positions).to(self._dtype) for table in (self.cos, self.sin))
        return Rotation(cos.unsqueeze(1), sin.unsqueeze(1), self.interleaved)


def read_length(config: ModelConfig) -> int:
    """The most positions the model is for: max_position_embeddings, or what YaRN stretches the original length to."""
    stated = config.integer("max_position_embeddings")
    section, kind = _section(config)
    if section is None or kind != "yarn":
        return stated
    original, factor = _yarn_stretch(section, stated)
    if original * factor >= MAX_INT:
        raise section.error("factor", f"{factor:g} makes the model longer than {MAX_INT - 1} tokens")
    return max(stated, int(original * factor))


def read_scaling(config: ModelConfig, size: int) -> RopeScaling:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before). size: rotated dimensions.
    Raises WeightError for a type other than default, linear, llama3 and yarn."""
    if size % 2:
        raise config.error("head size", f"must be even to be rotated, got {size}")
    section, kind = _section(config)
    theta_source = section if section is not None and section.has("rope_theta") else config
    theta = theta_source.number("rope_theta", 10000.0, low=1.0)
    plain = theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    if section is None or kind == "default":
        return RopeScaling(plain)
    if kind == "linear":
        return RopeScaling(plain / section.number("factor", low=1.0))
    if kind == "llama3":
        return RopeScaling(_llama3(section, plain))
    if kind == "yarn":
        return _yarn(section, plain, theta, config.integer("max_position_embeddings"))
    raise section.error("rope_type", f"{kind!r} is not supported (only 'default', 'linear', 'llama3', 'yarn')")


def _section(config: ModelConfig) -> tuple[ModelConfig | None, str]:
    """The settings of the rotation, if there are any, and their type."""
    section = config.section("rope_parameters") or config.section("rope_scaling")
    return section, "default" if section is None else section.text("rope_type", section.text("type", "default"))


def _llama3(section: ModelConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor = section.number("factor", low=1.0)
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise section.error("high_freq_factor", f"must exceed low_freq_factor, got {high} and {low}")
    turns = section.integer("original_max_position_embeddings") * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / factor * (1 - kept)


def _yarn_stretch(section: ModelConfig, stated: int) -> tuple[int, float]:
    """(length before, factor). stated: the config's max_position_embeddings."""
    original = section.integer("original_max_position_embeddings", stated)
    return original, section.number("factor", stated / original, low=1.0)


def _yarn(section: ModelConfig, plain: torch.Tensor, theta: float, stated: int) -> RopeScaling:
    """YaRN (arXiv 2309.00071): pairs that turn often keep their frequency, others are interpolated."""
    original, factor = _yarn_stretch(section, stated)
    size = 2 * plain.shape[0]

    def pair_turning(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_turning(section.number("beta_fast", 32.0, low=1e-3))
    high = pair_turning(section.number("beta_slow", 1.0, low=1e-3))
    if section.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inv_freq = plain / factor * ramp + plain * (1 - ramp)
    return RopeScaling(inv_freq, _yarn_amplitude(section, factor), _yarn_softmax_factor(section, factor))


def _yarn_amplitude(section: ModelConfig, factor: float) -> float:
    if section.has("attention_factor"):
        return section.number("attention_factor")
    mscale, all_dim = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)
    if mscale and all_dim:
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _yarn_softmax_factor(section: ModelConfig, factor: float) -> float:
    return _mscale(factor, section.number("mscale_all_dim", 0.0)) ** 2


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
