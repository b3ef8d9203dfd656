"""What this process may use of its machine: cores and memory."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores() -> int:
    """Cores this process may use: its affinity, and the control group's quota if that is lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # no control group: the affinity counts
    return cores


def available_memory() -> int:
    """Bytes this process may still take: the machine's, or the control group's limit if that is lower."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            available = min(available, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no control group, or another version of the interface: the machine's memory counts
    return max(available, 0)
