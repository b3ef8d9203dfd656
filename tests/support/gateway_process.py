"""python gateway_process.py: a gateway over one scripted instance process, whose pid it prints; then it waits."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from kllm.cluster.gateway import Gateway
from kllm.cluster.launchers.local import LocalInstance, LocalLauncher

SCRIPT = str(Path(__file__).with_name("instance_process.py"))


class ReportingLauncher(LocalLauncher):
    async def launch(self) -> LocalInstance:
        instance = await super().launch()
        print(instance.pid, flush=True)
        return instance


async def main() -> None:
    launcher = ReportingLauncher(lambda address: [sys.executable, SCRIPT, "stream", address])
    await Gateway([launcher], rng=random.Random()).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
