"""What an adapter finds out about its engine before it says Hello."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from dataclasses import dataclass

from kllm.cluster.external.completion import NO_TOKEN_IDS, ChunkReader, completion_body
from kllm.cluster.external.config import ExternalEngine
from kllm.cluster.external.engine_metrics import EngineMetrics
from kllm.cluster.external.errors import EngineBusy, EngineFault, EngineUnavailable, EngineUnusable, NoTokenIds
from kllm.cluster.external.http_engine import HttpEngine
from kllm.messages import Submit
from kllm.request import InvalidRequest, Request, SamplingParams

TRIAL_TOKEN = 1  # in every vocabulary
TRIAL_TIMEOUT_S = 60.0  # the first completion of an engine's life may take a while
USUAL_BLOCK_TOKENS = 16
GUESSED_SEQUENCES = 16  # of the greatest length, in a KV cache whose size is not known
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
    longest = math.ceil(max_model_len / block_tokens)
    await _try_completion(engine, card.id, max_model_len)
    return EngineFacts(
        model=card.id,
        title=f"{OWNERS.get(card.owned_by, card.owned_by[:40] or 'an engine')} {version}".rstrip(),
        max_model_len=max_model_len,
        block_tokens=block_tokens,
        num_blocks=(metrics.num_blocks if metrics is not None else 0) or GUESSED_SEQUENCES * longest,
        absolute_draws=card.owned_by == "kllm",
        baseline=metrics,
    )


async def _try_completion(engine: HttpEngine, model: str, max_model_len: int) -> None:
    """One token: the engine takes token ids, streams, and says which tokens it has sampled."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    trial = Submit(request=Request(request_id="kllm-trial", prompt_token_ids=[TRIAL_TOKEN], params=params))
    reader = ChunkReader(trial)
    body = completion_body(trial, model, max_model_len, absolute_draws=True)
    try:
        async with asyncio.timeout(TRIAL_TIMEOUT_S), aclosing(engine.complete(body, "kllm-trial")) as chunks:
            async for data in chunks:
                reader.read(data)
        if reader.next_index == 0:
            raise NoTokenIds(NO_TOKEN_IDS)
    except InvalidRequest as error:
        raise EngineUnusable(f"{engine.url} refuses a completion with token ids: {error.message}") from error
    except NoTokenIds as error:
        raise EngineUnusable(f"{engine.url} cannot be used: {error}") from error
    except EngineFault as error:
        kind = EngineUnusable if 400 <= error.status < 500 else EngineUnavailable
        raise kind(f"a first completion at {engine.url} failed: {error}") from error
    except (EngineBusy, TimeoutError) as error:
        raise EngineUnavailable(f"a first completion at {engine.url} failed: {str(error) or 'no answer'}") from error
