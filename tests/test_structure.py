"""The shape of the house: imports point downwards, and the light parts stay light."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "servicekit": set(),
    "schemas": set(),
    "pool": {"servicekit", "schemas"},
    "gateway": {"servicekit", "schemas", "pool"},
    "reward": {"servicekit", "schemas", "pool", "steplog"},
    "trainer": {"servicekit", "schemas", "pool"},
    "console": {"servicekit", "schemas", "pool"},
    "replay": {"servicekit", "schemas", "pool"},
    "steplog": {
        *("servicekit", "schemas", "pool", "gateway", "reward", "trainer", "replay", "console"),
    },
}
OURS = {*MAY_IMPORT, "tests", "bench"}
SDK = [*(ROOT / "steplog" / "environment").rglob("*.py")]
SDK_MAY_IMPORT = ("steplog.environment", "servicekit")


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
        wrong = (imported(file) & OURS) - MAY_IMPORT[package] - {package}
        assert not wrong, f"{file.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_rewards_import_nothing_of_the_public_face_but_its_classes() -> None:
    """These import none of our packages, which a user's own `reward.py` could hide."""
    for file in (ROOT / "reward").rglob("*.py"):
        of_face = {name for name in modules_imported(file) if name.partition(".")[0] == "steplog"}
        assert of_face <= {"steplog.rewards"}, file.relative_to(ROOT)
    assert not imported(ROOT / "steplog" / "rewards.py") & OURS


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
    light.append(ROOT / "trainer" / "decisions")
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
    for file in SDK:
        ours = {name for name in modules_imported(file) if name.partition(".")[0] in OURS}
        wrong = [name for name in ours if not name.startswith(SDK_MAY_IMPORT)]
        assert not wrong, f"{file.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_importing_steplog_loads_nothing_yet() -> None:
    script = "import sys, steplog; print({'pydantic', 'openai'} & {*sys.modules})"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert told.stdout.strip() == "set()", told.stderr


def test_the_core_of_the_pool_does_not_know_kafka() -> None:
    edges = {"pool.connection", "pool.topics", "pool.readers", "pool.consumers", "pool.producers"}
    for file in (ROOT / "pool" / "core").glob("*.py"):
        modules = modules_imported(file)
        wrong = [
            name for name in modules if name.startswith(("confluent_kafka", "aiokafka", *edges))
        ]
        assert not wrong, f"{file.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph() -> dict[str, set[str]]:
    """Modules of the project to the modules they import; lazy and type-checking imports count too."""
    files = {module_name(f): f for package in MAY_IMPORT for f in (ROOT / package).rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        targets: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                targets.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                targets.update(names & files.keys() or {node.module})
        graph[module] = (targets & files.keys()) - {module}
    return graph


def import_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for target in graph[module]:
            if target not in order:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], order[target])
        if low[module] == order[module]:
            circle = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(circle) > 1:
                circles.append(sorted(circle))

    for module in graph:
        if module not in order:
            visit(module)
    return circles


def test_no_module_imports_itself_through_others() -> None:
    assert import_circles(import_graph()) == []
