"""Finds files of the user that hide our packages.

Our packages have plain names. A `trainer.py` or `pool/` that comes earlier on Python's path, such as in
the folder where `python -m steplog` was started, is imported in their place, and what then fails is a
riddle. Finding a package does not import it.
"""

from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("schemas", "pool", "gateway", "reward", "trainer", "replay", "console")
INSTALLED = Path(__file__).resolve().parents[1]


def explain_shadowing() -> str | None:
    """One sentence on the first package that is hidden; None if none is."""
    for package in PACKAGES:
        spec = find_spec(package)
        origin = spec and spec.origin
        if origin and Path(origin).resolve().parent != INSTALLED / package:
            return (
                f"{origin} hides steplog's own package {package}: rename it, or start `steplog` where "
                "Python does not find it."
            )
    return None
