"""The folders of the trainer import each other in one direction only."""

import ast
from pathlib import Path

import trainer

ROOT = Path(str(trainer.__file__)).parent
FOLDERS = (
    "reproduction",
    "offline",
    "decisions",
    "incarnation",
    "progress",
    "checkpoints",
    "model",
    "weights",
    "data",
    "algorithm",
)
"""Each imports only folders that come after it."""


def imported_folders(file: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    parts = [module.split(".") for module in modules if module.startswith("trainer.")]
    return {names[1] for names in parts} & {*FOLDERS}


def test_every_folder_has_its_place_in_the_order() -> None:
    folders = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert folders == {*FOLDERS}
    assert trainer.__doc__ is not None
    listed = [line.split()[0] for line in trainer.__doc__.splitlines() if line.startswith("    ")]
    assert listed == [*FOLDERS]


def test_folders_import_downwards_only() -> None:
    for place, folder in enumerate(FOLDERS):
        for file in (ROOT / folder).glob("*.py"):
            upwards = imported_folders(file) & {*FOLDERS[:place]}
            assert not upwards, f"{file.relative_to(ROOT)} imports {', '.join(sorted(upwards))}"
