"""The file formats of exported data sets, and what a row of them is."""

from typing import Literal

from servicekit import distribution
from servicekit.errors import Fatal

FileFormat = Literal["parquet", "jsonl"]
RowKind = Literal["trajectory", "step"]


def require_pyarrow() -> None:
    """Raises Fatal if Parquet files cannot be read or written here."""
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        command = distribution.install_command("parquet")
        raise Fatal(f"Parquet needs pyarrow: run `{command}`, or use JSON lines.") from error
