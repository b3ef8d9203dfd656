"""Every knob of `kllm verify`."""

from __future__ import annotations

from pydantic import Field, field_validator

from kllm.config import Config
from kllm.verification.variants import VARIANTS


class VerifyConfig(Config):
    """What to compare with the plain path, and on how much text."""

    variants: list[str] = Field(
        [],
        description=f"Variants to run, separated by commas or given several times: {', '.join(VARIANTS)}. "
        "Default: all (--quick: a selection) that can run here.",
    )
    quick: bool = Field(False, description="A small version of everything, for continuous integration.")
    tokens: int | None = Field(
        None, ge=32, le=80_000, description="Tokens of English text to score; by default 20480 (--quick: 2048)."
    )
    window: int = Field(512, ge=32, le=4096, description="Tokens scored together, as one prompt.")
    threads: int | None = Field(None, ge=1, description="Compute threads; by default one per available core.")

    @field_validator("variants")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        split = [name.strip() for given in names for name in given.split(",") if name.strip()]
        for name in split:
            if name not in VARIANTS:
                raise ValueError(f"{name} is not a variant: choose from {', '.join(VARIANTS)}")
        return list(dict.fromkeys(split))
