from __future__ import annotations

import pytest

from kllm.events_config import KVEventsConfig, endpoint_for, offset_endpoint, replay_endpoint_for


def test_the_json_of_vllm_is_understood_and_defaults_stay_on_loopback() -> None:
    config = KVEventsConfig.from_json('{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv@a"}')
    assert config.on
    assert (config.endpoint, config.replay_endpoint, config.topic) == ("tcp://127.0.0.1:5557", None, "kv@a")
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)
    assert (config.format, config.hash_format, config.medium_names) == ("tagged", "int", "vllm")
    assert not KVEventsConfig().on
    assert not KVEventsConfig.from_json('{"enable_kv_cache_events": true, "publisher": "null"}').on


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "kv_events_config is not JSON: .*line 1"),
        ("[]", "must be a JSON object"),
        ('{"endpont": "tcp://127.0.0.1:1"}', "endpont: Extra inputs"),
        ('{"endpoint": "127.0.0.1:5557"}', "endpoint: .*is not tcp://HOST:PORT"),
        ('{"endpoint": "tcp://*:0"}', "endpoint: .*port 0, which does not exist"),
        ('{"endpoint": "tcp://*:70000"}', "port 70000, which does not exist"),
        ('{"endpoint": "inproc://x"}', "is not tcp://HOST:PORT or ipc://PATH"),
        ('{"replay_endpoint": "tcp://127.0.0.1:5557"}', "at least 1 ports apart"),
        ('{"buffer_steps": 0}', "buffer_steps: "),
        ('{"max_queue_size": "many", "hwm": -1}', "hwm: .*; max_queue_size: "),
        ('{"format": "map"}', "format: Input should be 'tagged' or 'array'"),
        ('{"publisher": "kafka"}', "publisher: "),
    ],
)
def test_errors_name_the_field(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVEventsConfig.from_json(text)


def test_each_publisher_has_its_own_ports() -> None:
    config = KVEventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://[::1]:6557")
    assert [endpoint_for(config, rank) for rank in range(3)] == ["tcp://*:5557", "tcp://*:5558", "tcp://*:5559"]
    assert replay_endpoint_for(config, 2) == "tcp://[::1]:6559"
    second = config.for_instance(1, instances=3, ranks=2)
    assert (second.endpoint, second.replay_endpoint) == ("tcp://*:5559", "tcp://[::1]:6559")
    assert offset_endpoint("ipc:///run/events", 0) == "ipc:///run/events"
    assert offset_endpoint("ipc:///run/events", 2) == "ipc:///run/events_dp2"
    assert offset_endpoint("tcp://127.0.0.1:*", 2) == "tcp://127.0.0.1:*"
    with pytest.raises(ValueError, match="port 65536, which does not exist"):
        offset_endpoint("tcp://*:65535", 1)


def test_ports_of_several_instances_must_not_overlap() -> None:
    config = KVEventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5560")
    config.for_instance(2, instances=3)
    with pytest.raises(ValueError, match="at least 4 ports apart: there are 4 publishers"):
        config.for_instance(0, instances=2, ranks=2)
