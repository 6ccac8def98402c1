"""The test files that need torch, vLLM or the library of Atropos: `make setup-cpu`, not `make setup`.

All their tests have the mark `heavy`; single tests of other files have it by `@pytest.mark.heavy`.
Files that a run deselects by `-m 'not heavy'` or `-m heavy` are not even imported, which would cost
every worker some ten seconds. Without heavy tests, torch is hidden as if it were not installed.
"""

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
_ALGORITHM = ("acceptance", "divergence", "losses", "masks", "objective", "statistics", "trl")
_TRAINER = (
    "checkpoints",
    "export",
    "faults",
    "kills",
    "give_up",
    "learner",
    "many_readers",
    "out_of_memory",
    "poison",
    "ranks",
    "service",
)
_WEIGHTS = ("adapters", "fleet", "nccl", "packing", "ranks", "vllm", "vllm_lora")
PLACES = (
    *("gateway/real_engine", "gateway/atropos/test_acceptance.py"),
    *("gateway/atropos/test_bare_servers.py", "gateway/atropos/test_training.py"),
    *("trainer/data/test_scored.py", "trainer/learning"),
    *("trainer/model", "trainer/offline/test_kills.py", "trainer/offline/test_service.py"),
    *("trainer/reproduction/test_command.py", "telemetry/test_logs.py", "telemetry/test_traces.py"),
    *(f"trainer/algorithm/test_{name}.py" for name in _ALGORITHM),
    *(f"trainer/test_{name}.py" for name in _TRAINER),
    *(f"trainer/weights/test_{name}.py" for name in _WEIGHTS),
)
"""Files, or folders with all that is in them."""


_ALL_SLOW = re.compile(r"^pytestmark = .*\bmark\.slow\b", re.MULTILINE)
_PATHS = {TESTS / place for place in PLACES}


@cache
def is_heavy(path: Path) -> bool:
    return not _PATHS.isdisjoint((path, *path.parents))


def excludes_heavy(marks: str) -> bool:
    return "not heavy" in marks


def is_deselected(path: Path, marks: str) -> bool:
    """Whether the mark expression deselects every test of this file."""
    if path.suffix != ".py" or not path.name.startswith("test_"):
        return False
    if excludes_heavy(marks):
        return is_heavy(path) or _ALL_SLOW.search(path.read_text()) is not None
    if re.search(r"\bheavy\b", marks):
        return not is_heavy(path) and "mark.heavy" not in path.read_text()
    if marks.startswith("slow"):  # REAL: the marks of tests with a real vLLM
        return not re.search(r"mark\.slow|\bREAL\b", path.read_text())
    return False
