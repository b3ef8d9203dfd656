"""kLLM: an LLM inference engine and the serving platform around it.

    from kllm import LLM, SamplingParams
    print(LLM("smollm2").generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text)

Importing this package imports neither torch nor anything heavy; LLM does when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kllm.request import RequestOutput, SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from kllm.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "StructuredOutputs", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from kllm.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
