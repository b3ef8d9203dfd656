"""Two hosts on this one: network namespaces joined by a cable, which can be made slow and cut. Needs root, iproute2."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess

_numbers = itertools.count()


class TwoHosts:
    """A context manager. names: of the namespaces; addresses: of their ends of the cable."""

    def __init__(self) -> None:
        tag = f"{os.getpid() % 100_000}-{next(_numbers)}"
        self.names = (f"kllm{tag}a", f"kllm{tag}b")
        self.addresses = ("10.213.77.1", "10.213.77.2")

    def __enter__(self) -> TwoHosts:
        one, other = self.names
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "link", "add", "cable", "netns", one, "type", "veth", "peer", "name", "cable", "netns", other)
            for name, address in zip(self.names, self.addresses, strict=True):
                _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "cable")
                _run("ip", "-n", name, "link", "set", "cable", "up")
                _run("tc", "-n", name, "qdisc", "add", "dev", "cable", "root", *_bucket("1gbit"))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for name in self.names:
            subprocess.run(("ip", "netns", "delete", name), check=False, capture_output=True)

    def limit(self, rate: str) -> None:
        """In both directions, such as 10mbit."""
        for name in self.names:
            _run("tc", "-n", name, "qdisc", "change", "dev", "cable", "root", *_bucket(rate))

    def cut(self) -> None:
        _run("ip", "-n", self.names[0], "link", "set", "cable", "down")

    def mend(self) -> None:
        _run("ip", "-n", self.names[0], "link", "set", "cable", "up")

    def sent(self, index: int) -> int:
        """Bytes that a host has sent so far."""
        path = "/sys/class/net/cable/statistics/tx_bytes"
        return int(_run("ip", "netns", "exec", self.names[index], "cat", path))

    def command(self, index: int) -> list[str]:
        """What goes before a command that is to run on a host."""
        return ["ip", "netns", "exec", self.names[index]]


def why_not() -> str:
    """Why there cannot be two hosts; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"needs {' and '.join(missing)} (iproute2)"
    try:
        with TwoHosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"


def _bucket(rate: str) -> tuple[str, ...]:
    return ("tbf", "rate", rate, "burst", "16kb", "latency", "200ms")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
