"""The project's own files: what is imported is declared, and GitHub can read what it is given."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_structure import MAY_IMPORT, ROOT, imported

GITHUB = ROOT / ".github"


def declared_distributions() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    return {canonicalize_name(Requirement(r).name) for r in [*project["dependencies"], *extras]}


def imported_packages() -> dict[str, Path]:
    """Top-level packages that the distribution imports, each with a file that does."""
    files = [file for folder in MAY_IMPORT for file in (ROOT / folder).rglob("*.py")]
    return {package: file for file in files for package in imported(file)}


def test_every_imported_package_is_declared() -> None:
    declared = declared_distributions()
    distributions = packages_distributions()
    ours = {*MAY_IMPORT, *sys.stdlib_module_names}
    undeclared = {
        f"{package} ({file.relative_to(ROOT)})"
        for package, file in imported_packages().items()
        if package not in ours
        and not {canonicalize_name(name) for name in distributions.get(package, [package])}
        & declared
    }
    assert not undeclared, f"declare in pyproject.toml: {', '.join(sorted(undeclared))}"


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", "workflows/*.yml"),
        ("github-issue-forms", "ISSUE_TEMPLATE/*_*.yml"),
        ("github-issue-config", "ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_github_accepts_its_files(schema: str, files: str) -> None:
    """By its published schemas, which the command line of check-jsonschema carries."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    check = subprocess.run([*command, *GITHUB.glob(files)], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout


def test_the_workflow_runs_targets_that_exist() -> None:
    workflow = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
    targets = workflow["jobs"]["make"]["strategy"]["matrix"]["target"]
    makefile = (ROOT / "Makefile").read_text()
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []
