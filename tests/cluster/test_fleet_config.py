from __future__ import annotations

from pathlib import Path

import pytest

from kllm.cluster.fleet_config import FleetConfigError, RemoteInstanceEntry, name_of, read_fleet
from kllm.transport.fleet_key import key_from

WHOLE = """
model = "smollm2"
key_file = "fleet.key"

[server]
port = 0
routing = "cache-aware"

[[instance]]
address = "10.0.0.5:7001"
role = "prefill"

[[instance]]
address = "ipc:///run/kllm/b"

[[external]]
url = "http://127.0.0.1:8001/v1"
"""


def read(folder: Path, text: str) -> None:
    path = folder / "fleet.toml"
    path.write_text(text)
    read_fleet(path)


def test_a_whole_file(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(WHOLE)
    (tmp_path / "fleet.key").write_text("ab" * 32)
    (tmp_path / "fleet.key").chmod(0o600)
    config, key = read_fleet(tmp_path / "fleet.toml")
    assert key == key_from(bytes.fromhex("ab" * 32))
    assert (config.model, config.server.port, config.server.routing) == ("smollm2", 0, "cache-aware")
    assert config.instance == [
        RemoteInstanceEntry(address="tcp://10.0.0.5:7001", role="prefill"),
        RemoteInstanceEntry(address="ipc:///run/kllm/b"),
    ]
    assert [name_of(entry) for entry in config.entries] == [
        "tcp://10.0.0.5:7001",
        "ipc:///run/kllm/b",
        "http://127.0.0.1:8001",
    ]


ONE = '[[instance]]\naddress = "127.0.0.1:1"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model = ", "fleet.toml: is not TOML: Invalid value (at end of document)"),
        ('model = "m"\n', "fleet.toml: names no [[instance]] and no [[external]]"),
        (ONE, "fleet.toml: model: field required"),
        (f'model = "m"\n[server]\nport = 99999\n{ONE}', "fleet.toml, line 3: server.port: input should be less than"),
        (f'model = "m"\n[server]\nports = 1\n{ONE}', "fleet.toml, line 3: server.ports: extra inputs are not"),
        (f'model = "m"\n[server]\ninstances = 2\n{ONE}', "fleet.toml, line 3: server.instances: instances of a fleet"),
        (f'model = "m"\n{ONE}[[instance]]\nrole = "p"\naddress = "h"\n',
         "fleet.toml, line 6: instance[1].address: 'h' is not an address"),
        (f'model = "m"\n{ONE}[[instance]]\nrole = "decode"\n', "fleet.toml, line 4: instance[1].address: field"),
        (f'model = "m"\n{ONE}role = "p"\n', "fleet.toml, line 4: instance[0].role: input should be 'both', 'prefill'"),
        (f'model = "m"\n{ONE}[[instance]]\naddress = "tcp://127.0.0.1:1"\n',
         "fleet.toml, line 5: instance[1].address: tcp://127.0.0.1:1 is there twice"),
        ('model = "m"\n[[instance]]\naddress = "10.0.0.1:1"\n',
         "fleet.toml, line 3: instance[0].address: tcp://10.0.0.1:1 can be reached from other machines"),
        (f'model = "m"\nkey_file = "k"\n{ONE}', "fleet.toml, line 2: key_file: the key file "),
        ('model = "m"\n[[external]]\nurl = "ftp://x"\n', "fleet.toml, line 3: external[0].url: 'ftp://x' is not an"),
        ('instance = 3\nmodel = "m"\n', "fleet.toml, line 1: instance: input should be a valid list"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(FleetConfigError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FleetConfigError, match=r"absent.toml: No such file"):
        read_fleet(tmp_path / "absent.toml")
    (tmp_path / "fleet.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(FleetConfigError, match="is not text in UTF-8"):
        read_fleet(tmp_path / "fleet.toml")
