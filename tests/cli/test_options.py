"""Flags come from config fields, and values are judged by the config alone."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from kllm.benchmark.config import LatencyConfig, LoadConfig, ThroughputConfig
from kllm.cli.errors import UsageError
from kllm.cli.local_server import engine_arguments
from kllm.cli.options import Flags, ModelArgument, build, config_flags, flag_name
from kllm.config import EngineConfig, ServerConfig
from kllm.verification.config import VerifyConfig

CONFIGS = [EngineConfig, ServerConfig, LoadConfig, LatencyConfig, ThroughputConfig, VerifyConfig]


def parse(arguments: list[str], *configs) -> Flags:
    """The flags that a command with these configs sees."""
    seen: list[Flags] = []
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @config_flags(*configs)
    def command(positional: ModelArgument, flags: Flags) -> None:
        seen.append(flags)

    result = CliRunner().invoke(app, ["smollm2", *arguments])
    assert result.exit_code == 0, result.output
    return seen[0]


def test_nothing_given_means_the_configs_own_defaults():
    assert parse([], EngineConfig, ServerConfig) == {}
    assert build(EngineConfig, {}, model="m") == EngineConfig(model="m")


def unwrapped(text: str) -> str:
    """In one line, wherever it was broken: between words or after a hyphen."""
    return " ".join(text.split()).replace("- ", "-")


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_has_a_flag_with_its_description(config):
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @config_flags(config)
    def command(flags: Flags) -> None:
        raise AssertionError("help must not run the command")

    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    text = unwrapped(result.output)
    for name, field in config.model_fields.items():
        if field.is_required():
            continue
        assert f"{flag_name(name)} " in text
        assert unwrapped(field.description) in text


def test_values_of_every_kind():
    flags = parse(
        ["--max-num-seqs", "8", "--kv-cache-memory", "1.5GiB", "--no-enable-prefix-caching", "--dtype", "bf16"]
        + ["--port", "0", "--api-key", "a", "--api-key", "b", "--drain-timeout", "2.5", "--vllm-metrics"]
        + ["--log-level", "debug"],
        EngineConfig,
        ServerConfig,
    )
    engine = build(EngineConfig, flags, model="smollm2")
    assert engine == EngineConfig(
        model="smollm2", max_num_seqs=8, kv_cache_memory="1.5GiB", enable_prefix_caching=False, dtype="bfloat16"
    )
    assert engine.kv_cache_memory == 3 * 2**29
    assert build(ServerConfig, flags) == ServerConfig(
        port=0, api_key=["a", "b"], drain_timeout=2.5, vllm_metrics=True, log_level="debug"
    )


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (EngineConfig, ["--max-num-seqs", "0"], "--max-num-seqs: input should be greater than or equal to 1 (got '0')"),
        (EngineConfig, ["--max-num-seqs", "many"], "--max-num-seqs: input should be a valid integer"),
        (EngineConfig, ["--kv-cache-memory", "lots"], "--kv-cache-memory: 'lots' is not a size"),
        (EngineConfig, ["--dtype", "int3"], "--dtype: input should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        (EngineConfig, ["--kv-events-config", "{"], "--kv-events-config: kv_events_config is not JSON"),
        (EngineConfig, ["--kv-events-config", '{"endpoint": "x"}'], "--kv-events-config: endpoint: "),
        (EngineConfig, ["--pipeline-depth", "3"], "--pipeline-depth: input should be less than or equal to 2"),
        (ServerConfig, ["--port", "65536"], "--port: input should be less than or equal to 65535"),
        (ServerConfig, ["--drain-timeout=-1"], "--drain-timeout: input should be greater than or equal to 0"),
        (LoadConfig, ["--request-rate", "0"], "--request-rate: input should be greater than 0"),
        (LoadConfig, ["--dataset", "sharegpt"], "--dataset: neither one of random, shared-prefix, "),
        (LoadConfig, ["--arrivals", "gamma"], "--arrivals: needs a request rate that is not inf (got 'gamma')"),
        (LoadConfig, ["--length-spread", "1"], "--length-spread: input should be less than 1"),
    ],
)
def test_errors_name_the_flag_in_one_line(config, arguments, message):
    values = {"model": "smollm2"} if config is EngineConfig else {}
    with pytest.raises(UsageError) as caught:
        build(config, parse(arguments, config), **values)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_rates_may_be_infinite():
    assert build(LoadConfig, parse(["--request-rate", "inf"], LoadConfig)).request_rate == float("inf")


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(model="smollm2"),
        EngineConfig(model="/a b/c.gguf", dtype="float32", enable_prefix_caching=False, num_kv_blocks=7, threads=1),
        EngineConfig(model="smollm2", kv_events_config='{"enable_kv_cache_events": true, "topic": "a b"}'),
    ],
)
def test_arguments_for_a_child_give_the_same_config(config):
    model, *arguments = engine_arguments(config)
    assert build(EngineConfig, parse(arguments, EngineConfig), model=model) == config
