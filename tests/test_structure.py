"""The shape of the house: imports point downwards, and the light parts stay light."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "schemas": {"schemas"},
    "pool": {"schemas", "pool"},
    "gateway": {"schemas", "pool", "gateway"},
    "reward": {"schemas", "pool", "reward"},
    "trainer": {"schemas", "pool", "trainer"},
    "console": {"schemas", "pool", "console"},
    "replay": {"schemas", "pool", "replay"},
    "steplog": {"schemas", "pool", "gateway", "reward", "trainer", "replay", "console", "steplog"},
}
OURS = {*MAY_IMPORT, "tests", "bench"}
SDK = [*(ROOT / "steplog" / "environment").glob("*.py"), ROOT / "steplog" / "__init__.py"]
SDK_MAY_IMPORT = ("steplog.environment", "steplog.sources")


def imported(file: Path) -> set[str]:
    """Top-level packages that a module imports, anywhere in it."""
    return {name.partition(".")[0] for name in modules_imported(file)}


def modules_imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "steplog":
            names.update(f"steplog.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_downwards_only(package: str) -> None:
    for file in (ROOT / package).glob("**/*.py"):
        wrong = (imported(file) & OURS) - MAY_IMPORT[package]
        assert not wrong, f"{file.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_our_packages_are_not_shadowed(package: str) -> None:
    found = Path(str(importlib.import_module(package).__file__)).parent
    assert found == ROOT / package, (
        f"`import {package}` finds {found}: another distribution or folder of that name comes first "
        f"on the path, so start the services with the steplog command"
    )


def test_the_light_parts_do_not_import_torch() -> None:
    """Among them the trainer's settings and all that decides what is trained."""
    light = [ROOT / package for package in MAY_IMPORT if package != "trainer"]
    light.append(ROOT / "trainer" / "deciding")
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for folder in light
        for file in folder.rglob("*.py")
        if file.name != "__init__.py"
    ]
    modules.append("trainer.settings")
    script = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert told.stdout.strip() == "False", told.stderr


def test_the_sdk_knows_nothing_of_ours_but_itself() -> None:
    """An environment's author may have a `trainer` or a `pool` of their own."""
    for file in [*SDK, ROOT / "steplog" / "sources.py"]:
        ours = {name for name in modules_imported(file) if name.partition(".")[0] in OURS}
        wrong = [name for name in ours if not name.startswith(SDK_MAY_IMPORT)]
        assert not wrong, f"{file.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_importing_steplog_loads_nothing_yet() -> None:
    script = "import sys, steplog; print({'pydantic', 'openai'} & {*sys.modules})"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert told.stdout.strip() == "set()", told.stderr


def test_the_logic_of_the_pool_does_not_know_kafka() -> None:
    pure = "bookmark dead_letters errors groups ledger marks progress prompts trajectories"
    for name in pure.split():
        clients = imported(ROOT / "pool" / f"{name}.py") & {"confluent_kafka", "aiokafka"}
        assert not clients, f"pool/{name}.py imports {clients}"
