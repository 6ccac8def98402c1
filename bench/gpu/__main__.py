"""The whole pipeline and real weight updates on this machine's GPU: `python -m bench.gpu`.

Needs vLLM for GPUs; takes some eight minutes. `--tiny` runs the weight updates on the CPU, to try the
benchmark itself. The results go to a JSON file and to a table.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu import demo, weights


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", help="demo, 0.5B, 3B (default: all)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--into", type=Path, default=Path("gpu.json"), help="file of the results")
    options = parser.parse_args()
    parts = ["tiny"] if options.tiny else options.parts or ["demo", "0.5B", "3B"]
    results: dict[str, Any] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            results[part] = _run(part, Path(folder))
            options.into.write_text(json.dumps(results, indent=1) + "\n")
    print(_table(results))
    print(f"total: {time.monotonic() - started:.0f} s; {options.into}")
    sys.exit(any("error" in result for result in results.values()))


def _run(part: str, folder: Path) -> dict[str, Any]:
    """The figures of one part. One that fails does not keep the others from running."""
    try:
        if part == "demo":
            return demo.run(folder / "demo")
        return weights.run(part, "gloo" if part == "tiny" else "nccl", folder)
    except Exception as error:
        logs = {
            each.name: each.read_text(errors="replace")[-3000:] for each in folder.glob("*.log")
        }
        print(f"{part} failed: {error!r}", *logs.values(), sep="\n", flush=True)
        return {"error": repr(error)}


def _table(results: dict[str, Any]) -> str:
    lines = ["", "| what | figure |", "|---|---|"]
    for part, figures in results.items():
        lines += [
            f"| {part}: {name.replace('_', ' ')} | {_show(value)} |"
            for name, value in figures.items()
        ]
    return "\n".join([*lines, ""])


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_show(each)}" for name, each in value.items())
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


if __name__ == "__main__":
    main()
