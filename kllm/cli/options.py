"""Command-line flags made from the fields of the config classes.

    @app.command()
    @config_flags(EngineConfig, ServerConfig)
    def serve(model: str, flags: Flags) -> None:
        engine = build(EngineConfig, flags, model=model)

`max_num_seqs: int = Field(64, description=…)` becomes `--max-num-seqs INTEGER`, its help the description. Values reach
pydantic as text and are validated there, so that flags, Python and files have one set of rules and messages.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from kllm.cli.errors import UsageError
from kllm.config import Config, EngineConfig

Flags = dict[str, Any]  # flags that were given on the command line, by field name
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=EngineConfig.model_fields["model"].description)]
ConfigT = TypeVar("ConfigT", bound=Config)

_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def config_flags(*configs: type[Config]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's `flags` parameter by one option per field of `configs` that has a default."""
    fields = {name: field for config in configs for name, field in config.model_fields.items()}
    options = {name: _option(name, field) for name, field in fields.items() if not field.is_required()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            flags = {name: values.pop(name) for name in options}
            command(**values, flags={name: value for name, value in flags.items() if value not in (None, [])})

        own = [p for p in inspect.signature(command).parameters.values() if p.name != "flags"]
        hints = get_type_hints(command, include_extras=True)
        parameters = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in own]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in options.items()
        ]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def build(config: type[ConfigT], flags: Flags, **values: Any) -> ConfigT:
    """The config with `values` and those flags that are its fields. Raises UsageError naming the flag."""
    given = {name: value for name, value in flags.items() if name in config.model_fields} | values
    if "dtype" in given:
        given["dtype"] = _SHORT_DTYPES.get(given["dtype"], given["dtype"])
    try:
        return config.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        where = flag_name(name) + ": " if name else ""
        raise UsageError(f"{where}{_message(first)} (got {given.get(name)!r})") from error


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def _message(error: Any) -> str:
    """pydantic's message without its prefix for ValueErrors, as the middle of a sentence."""
    text: str = error["msg"].removeprefix("Value error, ")
    return text[0].lower() + text[1:]


def _option(name: str, field: FieldInfo) -> Any:
    """The annotation typer makes an option from; None means: not given, the config's default holds."""
    kind, choices = _kind(field)
    flag = flag_name(name)
    default = field.get_default(call_default_factory=True)
    declaration = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    help_text = field.description or ""
    if default is not None and default != []:
        shown = ("on" if default else "off") if kind is bool else default
        help_text += f" [default: {shown}]"
    metavar = "|".join(choices) if choices else None if kind is bool else _METAVARS.get(kind, "TEXT")
    option = typer.Option(declaration, help=help_text, metavar=metavar, show_default=False)
    if kind is bool:
        return Annotated[bool | None, option]
    if kind is list:
        return Annotated[list[str] | None, option]
    return Annotated[str | None, option]


_METAVARS: dict[Any, str] = {int: "INTEGER", float: "NUMBER"}


def _kind(field: FieldInfo) -> tuple[Any, tuple[str, ...]]:
    """(type without None and containers' parameters, the choices of a Literal). Sizes in bytes count as text."""
    annotation = field.annotation
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return str, tuple(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) is Annotated or any(not _is_bound(part) for part in field.metadata):
        return str, ()
    return get_origin(annotation) or annotation, ()


def _is_bound(part: Any) -> bool:
    """Whether this is a limit such as ge=1, and not something that reads other spellings of a value."""
    return type(part).__module__.startswith("annotated_types")
