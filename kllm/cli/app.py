"""The `kllm` command: serve, instance, gateway, chat, pull, bench, verify, capacity, simulate, cache.

Every command imports what it needs when it runs, so that `kllm serve` starts without torch and `--help` is quick.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

import kllm
from kllm.cli import bench, cache
from kllm.cli.capacity import capacity
from kllm.cli.errors import CommandError, UsageError
from kllm.cli.gateway import gateway
from kllm.cli.instance import instance
from kllm.cli.options import Flags, ModelArgument, build, config_flags
from kllm.cli.simulate import simulate
from kllm.cli.verify import verify
from kllm.config import EngineConfig, ServerConfig

app = typer.Typer(
    help="kLLM: an LLM inference engine and the serving platform around it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench")
app.add_typer(cache.app, name="cache")
app.command()(instance)
app.command()(gateway)
app.command()(verify)
app.command()(capacity)
app.command()(simulate)


@dataclass
class _Settings:
    debug: bool = False


_settings = _Settings()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kllm {kllm.__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    _settings.debug = debug


@app.command()
@config_flags(EngineConfig, ServerConfig)
def serve(model: ModelArgument, flags: Flags) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API."""
    engine_config = build(EngineConfig, flags, model=model)
    server_config = build(ServerConfig, flags)
    from kllm.server.main import serve as run_server

    run_server(engine_config, server_config)


@app.command()
def pull(model: ModelArgument) -> None:
    """Fetch MODEL into the cache, so that later starts need no network."""
    from kllm.hub import pull as fetch

    print(fetch(model).path)


@app.command()
@config_flags(EngineConfig)
def chat(
    flags: Flags,
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Model to start a server for.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Talk to this running server instead, such as http://host:8000.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key to send to the server.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.")] = None,
) -> None:
    """Chat with a model in the terminal. /reset, /system TEXT, /exit; Ctrl-C stops an answer."""
    from kllm.cli.chat import ChatClient, run_chat
    from kllm.cli.local_server import local_server

    sampling = {
        name: value
        for name, value in (("temperature", temperature), ("max_completion_tokens", max_tokens))
        if value is not None
    }
    if url is not None:
        if model is not None or flags:
            raise UsageError("--url: a running server has its model already; give either --url or MODEL with its flags")
        run_chat(ChatClient(url, api_key, sampling), system)
        return
    if model is None:
        raise UsageError("MODEL or --url is needed")
    engine_config = build(EngineConfig, flags, model=model)
    with local_server(engine_config) as server:
        run_chat(ChatClient(server.url, server.api_key, sampling), system)


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        app(args=arguments, prog_name="kllm")
    except UsageError as error:
        _fail(str(error), 2)
    except CommandError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if _settings.debug:
            raise
        _fail(describe(error), 1)


def describe(error: Exception) -> str:
    """One line about an error: our own and the system's speak for themselves, others are named as what they are."""
    text = " ".join(str(error).split())
    if type(error).__module__.startswith("kllm.") or isinstance(error, OSError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text} (kllm --debug … shows where)"


def _fail(message: str, status: int) -> None:
    print(f"kllm: error: {message}", file=sys.stderr)
    sys.exit(status)
