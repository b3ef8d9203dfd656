"""A process with slots in shared memory: `python tests/support/shared_owner.py SLOTS PAGE_BYTES [UID]`. Page i holds
i + 1 in every byte; prints its address and stays until its input ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


class SharedOwner:
    """The process, in a session of its own. A context manager, which kills it."""

    def __init__(self, num_slots: int, page_bytes: int, *uid: int) -> None:
        command = [sys.executable, str(Path(__file__)), str(num_slots), str(page_bytes), *map(str, uid)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def __enter__(self) -> SharedOwner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    from kllm.cache.transfer.shared_memory import SharedMemoryTransfer

    num_slots, page_bytes, *uid = map(int, sys.argv[1:])
    if uid:
        os.setuid(uid[0])
    transfer = SharedMemoryTransfer(num_slots, page_bytes)
    for slot in range(min(num_slots, 64)):
        transfer.slots[slot] = slot + 1
    print(transfer.address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
