"""A process with slots that others may read: `python tests/support/slot_owner.py shm|mooncake SLOTS PAGE_BYTES HOST`.
Page i holds i + 1 in every byte. Prints its address and stays until its input ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path


class SlotOwner:
    """The process, in a session of its own. A context manager, which kills it. user: another one that it belongs to.
    prefix: of its command."""

    def __init__(
        self,
        kind: str,
        num_slots: int,
        page_bytes: int,
        *,
        host: str = "127.0.0.1",
        user: int | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        command = [*prefix, sys.executable, str(Path(__file__)), kind, str(num_slots), str(page_bytes), host]
        if user is not None:
            command.append(str(user))
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def __enter__(self) -> SlotOwner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def stop(self) -> None:
        """It stands still: none of its threads runs when this returns."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


async def main() -> None:
    from kllm.cache.transfer.opening import make_transfer

    kind, num_slots, page_bytes, host, *user = sys.argv[1:]
    if user:
        import kllm.cache.transfer.shared_memory  # noqa: F401  # the other user may not read the interpreter's files

        os.setuid(int(user[0]))
    transfer = await make_transfer(kind, int(num_slots), int(page_bytes), host)  # type: ignore[arg-type]
    assert transfer is not None
    for slot in range(min(len(transfer.slots), 64)):
        transfer.slots[slot] = slot + 1
    print(transfer.address, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
