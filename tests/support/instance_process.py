"""python instance_process.py BEHAVIOUR ADDRESS: a scripted instance as a process of its own.

BEHAVIOUR: stream (as usual), die (before it says anything), mute (connects, says nothing, ignores SIGTERM).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.scripted_instance import HELLO, Faults, ScriptedInstance

from kllm.transport.link import LinkClosed
from kllm.transport.zeromq import dial


async def main(behaviour: str, address: str) -> None:
    if behaviour == "die":
        print("loading weights\nmodel.safetensors: no such tensor: lm_head", file=sys.stderr)
        sys.exit(3)
    link = dial(address)
    if behaviour == "mute":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            await link.recv()
        except LinkClosed:
            return
    await ScriptedInstance(link, Faults(), HELLO).main()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
