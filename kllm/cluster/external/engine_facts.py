"""What an adapter finds out about its engine before it says Hello."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from kllm.cluster.external.completion import REQUIREMENT
from kllm.cluster.external.config import ExternalEngine
from kllm.cluster.external.engine_metrics import EngineMetrics
from kllm.cluster.external.errors import EngineBusy, EngineFault, EngineUnavailable, EngineUnusable
from kllm.cluster.external.http_engine import HttpEngine
from kllm.request import InvalidRequest

TRIAL_TOKEN = 1  # in every vocabulary
TRIAL_TIMEOUT_S = 60.0  # the first completion of an engine's life may take a while
USUAL_BLOCK_TOKENS = 16
OWNERS = {"vllm": "vLLM", "kllm": "kLLM"}


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """model: its name there. title: the engine and its version, for people. block_tokens, num_blocks: of its KV cache,
    or what stands for them. absolute_draws: see completion_body. baseline: its metrics at the start, if it has any."""

    model: str
    title: str
    max_model_len: int
    block_tokens: int
    num_blocks: int
    absolute_draws: bool
    baseline: EngineMetrics | None


async def find_out(engine: HttpEngine, config: ExternalEngine) -> EngineFacts:
    """Raises EngineUnavailable (try again) or EngineUnusable (in vain)."""
    card = await engine.card(config.model)
    max_model_len = card.max_model_len or config.max_model_len or 0
    if max_model_len < 2:
        raise EngineUnusable(f"{config.url}/v1/models does not say max_model_len: set max_model_len")
    version, metrics = await engine.version(), await engine.metrics()
    block_tokens = config.block_size or (metrics.block_tokens if metrics is not None else 0)
    if config.kv_events is not None and not block_tokens:
        raise EngineUnusable(f"{config.url}/metrics does not say the size of a KV block: set block_size")
    if config.block_size and metrics is not None and metrics.block_tokens not in (0, config.block_size):
        raise EngineUnusable(
            f"{config.url} has KV blocks of {metrics.block_tokens} tokens, but block_size is {config.block_size}"
        )
    block_tokens = block_tokens or USUAL_BLOCK_TOKENS
    longest = -(-max_model_len // block_tokens)
    await _try_completion(engine, card.id)
    return EngineFacts(
        model=card.id,
        title=f"{OWNERS.get(card.owned_by, card.owned_by[:40] or 'an engine')} {version}".rstrip(),
        max_model_len=max_model_len,
        block_tokens=block_tokens,
        num_blocks=(metrics.num_blocks if metrics is not None else 0) or longest * config.max_requests,
        absolute_draws=card.owned_by == "kllm",
        baseline=metrics,
    )


async def _try_completion(engine: HttpEngine, model: str) -> None:
    """One token: the engine takes token ids, streams, and says which tokens it sampled."""
    body = {
        "model": model,
        "prompt": [TRIAL_TOKEN],
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    try:
        async with asyncio.timeout(TRIAL_TIMEOUT_S), aclosing(_trial(engine, body)) as tokens:
            if not any([bool(found) async for found in tokens]):
                raise EngineUnusable(f"{engine.url}: {REQUIREMENT}")
    except InvalidRequest as error:
        raise EngineUnusable(f"{engine.url} refuses a completion: {error.message}; {REQUIREMENT}") from error
    except (EngineBusy, EngineFault) as error:
        raise EngineUnavailable(f"{engine.url}: a first completion failed: {error}") from error
    except TimeoutError as error:
        raise EngineUnavailable(f"{engine.url}: a first completion took over {TRIAL_TIMEOUT_S:g} s") from error
