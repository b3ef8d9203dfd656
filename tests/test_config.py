from __future__ import annotations

import pytest
from pydantic import ValidationError

from kllm.config import EngineConfig, ServerConfig
from kllm.events_config import KVEventsConfig

ON = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:7001"}


def test_cache_events_are_configured_by_json_or_an_object() -> None:
    off = EngineConfig(model="m")
    assert not off.publishes_events
    given = (ON, KVEventsConfig.model_validate(ON), KVEventsConfig.model_validate(ON).model_dump_json())
    for value in given:
        config = EngineConfig.model_validate({"model": "m", "kv_events_config": value})
        assert config.publishes_events
        assert config.kv_events_config == KVEventsConfig.model_validate(ON)
        assert EngineConfig.model_validate_json(config.model_dump_json()) == config
    disabled = EngineConfig.model_validate({"model": "m", "kv_events_config": {}})
    assert not disabled.publishes_events


@pytest.mark.parametrize("value", ['{"hwm": 0}', {"hwm": 0}, {"hwm": "many"}, "[]", 3])
def test_a_wrong_events_config_is_refused(value: object) -> None:
    with pytest.raises(ValidationError, match="kv_events_config"):
        EngineConfig.model_validate({"model": "m", "kv_events_config": value})


@pytest.mark.parametrize("fields", [{"kv_events_config": ON}, {"l2_memory": "1GiB"}, {"l3": "folder"}])
def test_what_is_about_cached_prefixes_needs_some(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="enable_prefix_caching"):
        EngineConfig.model_validate({"model": "m", "enable_prefix_caching": False, **fields})


@pytest.mark.parametrize("field", ["api_key", "admin_api_key"])
@pytest.mark.parametrize("key", ["", " ", " a", "a\n"])
def test_a_key_that_nobody_means_is_refused(field: str, key: str) -> None:
    with pytest.raises(ValidationError, match="a key must not be empty"):
        ServerConfig.model_validate({field: ["right", key]})
