"""The numbers of the algorithm; half of them need torch, on the CPU."""

from importlib.util import find_spec

WITH_TORCH = ("losses", "divergence", "masks", "objective", "statistics", "acceptance", "trl")
collect_ignore = [] if find_spec("torch") else [f"test_{name}.py" for name in WITH_TORCH]
