"""What a gateway does with one request at one instance after another, over their links."""

from __future__ import annotations

from dataclasses import dataclass

from kllm.messages import Deltas, Down, EngineLoad, KvSource, PrefillDone, Submit, Up
from kllm.request import Request, SamplingParams
from kllm.transport.link import Link


def greedy_request(number: int, prompt: list[int], length: int) -> Request:
    params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    return Request(request_id=str(number), prompt_token_ids=prompt, params=params)


@dataclass
class Part:
    """What an instance made of a request. kv: where it can be had from, once prefilled. cached: prompt tokens found."""

    tokens: list[int]
    kv: KvSource | None = None
    cached: int = 0


class InstanceEnd:
    """The gateway's end of an instance's link, for one request at a time."""

    def __init__(self, link: Link[Up, Down]) -> None:
        self.link = link

    async def submit(self, submit: Submit) -> Part:
        """Until the request ends or has been prefilled."""
        self.link.send(submit)
        part = Part([])
        while True:
            message = await self.link.recv()
            if isinstance(message, PrefillDone):
                part.kv = message.kv
                return part
            for delta in message.items if isinstance(message, Deltas) else ():
                assert delta.finish_reason != "error", delta.error
                part.tokens += delta.token_ids
                part.cached = delta.num_cached_tokens or part.cached
                if delta.finish_reason is not None:
                    return part

    async def report(self) -> EngineLoad:
        """The next one."""
        while not isinstance(message := await self.link.recv(), EngineLoad):
            pass
        return message
