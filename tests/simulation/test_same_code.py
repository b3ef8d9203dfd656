"""Simulation runs the code that serves: it subclasses or copies no scheduler, cache, engine or gateway class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kllm

SOURCE = Path(kllm.__file__).parent
DECIDING = ("scheduling", "cache", "cluster", "engine")
STATEMENTS_OF_A_COPY = 4  # bodies shorter than this may be alike by chance


def modules(package: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((SOURCE / package).rglob("*.py")):
        yield ".".join(("kllm", *path.relative_to(SOURCE).with_suffix("").parts)), ast.parse(path.read_text())


def functions(package: str) -> Iterator[tuple[str, str]]:
    """(name, normalised body) of every function that is long enough to be called a copy."""
    for module, tree in modules(package):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) >= STATEMENTS_OF_A_COPY:
                yield f"{module}.{node.name}", "\n".join(ast.dump(statement) for statement in node.body)


def imported_classes(tree: ast.Module) -> set[str]:
    """Names that a module imports from the parts that decide."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(tuple(f"kllm.{p}" for p in DECIDING))
        for alias in node.names
    }


def test_no_class_of_the_simulation_derives_from_one_that_decides() -> None:
    for module, tree in modules("simulation"):
        imported = imported_classes(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).split("[")[0].split(".")[0] for base in node.bases}
                assert not bases & imported, f"{module}.{node.name} derives from {bases & imported}"


def test_no_function_of_the_simulation_is_a_copy() -> None:
    originals = {body: name for package in DECIDING for name, body in functions(package)}
    copies = {name: originals[body] for name, body in functions("simulation") if body in originals}
    assert not copies


def test_nothing_that_serves_knows_of_the_simulation() -> None:
    for package in ("scheduling", "cache", "cluster", "engine", "server", "messages.py", "transport"):
        root = SOURCE / package
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
            assert not {name for name in names if "simulat" in name.lower()}, f"{path} has a simulation branch"


def test_the_fleet_is_made_of_production_classes() -> None:
    tree = ast.parse((SOURCE / "simulation" / "launcher.py").read_text())
    assert {"make_scheduler", "put_tiers_below", "EngineCore", "instance_main"} <= imported_classes(tree)
    tree = ast.parse((SOURCE / "simulation" / "fleet.py").read_text())
    assert "Gateway" in imported_classes(tree)
