"""What to send, as knobs: shared by `kllm bench serve`, which sends it to a server, and `kllm simulate`."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from kllm.config import Config

SYNTHETIC = ("random", "shared-prefix", "long-short", "sessions")


class LengthConfig(Config):
    """How many prompts, and how long."""

    num_prompts: int = Field(100, ge=1, description="Requests to send; of a trace, the first so many.")
    input_len: int = Field(512, ge=1, description="Prompt tokens, beside a shared prefix.")
    output_len: int = Field(128, ge=1, description="Output tokens; the end of text is ignored.")
    seed: int = Field(0, ge=0, description="Seed of prompts, lengths and arrival times.")


class WorkloadConfig(LengthConfig):
    """Made-up requests of several kinds, and when they or those of a trace are sent."""

    request_rate: float | None = Field(
        None,
        gt=0,
        description="Requests (or conversations) a second; inf sends all at once. "
        "By default a trace's own times, inf otherwise.",
    )
    arrivals: Literal["poisson", "gamma", "bursty", "diurnal"] = Field(
        "poisson", description="Process of the arrivals at the request rate."
    )
    arrival_cv: float = Field(
        2.0, gt=0, le=100, description="gamma: standard deviation of the gaps between arrivals over their mean."
    )
    burst_on: float = Field(5.0, gt=0, description="bursty: mean seconds of a burst; the rate is the mean of all time.")
    burst_off: float = Field(15.0, gt=0, description="bursty: mean seconds between bursts.")
    diurnal_period: float = Field(600.0, gt=0, description="diurnal: seconds from one peak of the rate to the next.")
    diurnal_amplitude: float = Field(
        0.8, ge=0, le=1, description="diurnal: share by which the rate swings up and down."
    )
    length_spread: float = Field(
        0.0, ge=0, lt=1, description="random, long-short: lengths vary uniformly by this share."
    )
    prefix_len: int = Field(384, ge=1, description="shared-prefix: tokens that prompts share.")
    num_prefixes: int = Field(1, ge=1, description="shared-prefix: different prefixes, taken in turn.")
    long_share: float = Field(0.1, ge=0, le=1, description="long-short: share of requests that have a long prompt.")
    long_input_len: int = Field(4096, ge=1, description="long-short: tokens of a long prompt.")
    turns: int = Field(4, ge=1, description="sessions: requests of a conversation; each repeats what was said.")
    turn_len: int = Field(64, ge=1, description="sessions: new tokens of a turn after the first.")
    think_time: float = Field(1.0, ge=0, description="sessions: mean seconds from an answer to the next turn.")
    scale: float = Field(1.0, gt=0, le=16, description="Factor on the lengths of a trace.")

    @field_validator("arrivals")
    @classmethod
    def _has_a_rate(cls, arrivals: str, info: ValidationInfo) -> str:
        rate = info.data.get("request_rate")
        if arrivals != "poisson" and (rate is None or math.isinf(rate)):
            raise ValueError("needs a request rate that is not inf")
        return arrivals
