from __future__ import annotations

import pytest

from kllm.transport.addresses import AddressError, need_key, normalize, stays_here


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("127.0.0.1:7001", "tcp://127.0.0.1:7001"),
        ("tcp://10.0.0.1:0", "tcp://10.0.0.1:0"),
        ("tcp://[::1]:7001", "tcp://[::1]:7001"),
        ("localhost:7001", "tcp://127.0.0.1:7001"),
        ("tcp://gpu-3.example:7001", "tcp://gpu-3.example:7001"),
        ("tcp://*:7001", "tcp://*:7001"),
        ("ipc:///run/kllm/a", "ipc:///run/kllm/a"),
    ],
)
def test_addresses(given: str, normal: str) -> None:
    assert normalize(given) == normal


@pytest.mark.parametrize(
    "given",
    ["", "host", "tcp://host", "tcp://host:99999", "udp://h:1", "ipc://relative", "ipc:///" + "x" * 101, "h:1 "],
)
def test_what_is_none(given: str) -> None:
    with pytest.raises(AddressError):
        normalize(given)


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.0.1:1", True),
        ("tcp://[::1]:1", True),
        ("ipc:///a", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://[2001:db8::1]:1", False),
        ("tcp://gpu-3:1", False),
    ],
)
def test_what_others_reach_needs_a_key(address: str, here: bool) -> None:
    assert stays_here(address) == here
    need_key(address, has_key=True)
    if here:
        need_key(address, has_key=False)
    else:
        with pytest.raises(AddressError, match="give a key file"):
            need_key(address, has_key=False)
