"""The installed distribution. On package indexes its name is steplog-rl; the command and the import
are `steplog`."""

from importlib import metadata

from servicekit.errors import Fatal

NAME = "steplog-rl"


def version() -> str:
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        raise Fatal(
            f"{NAME} is not installed in this environment: run `make setup` in a checkout, "
            f"or `pip install {NAME}`."
        ) from None


def install_command(extra: str) -> str:
    """The command that installs an extra, for error messages."""
    return f"pip install '{NAME}[{extra}]'"
