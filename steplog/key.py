"""`steplog key`: makes an API key, which is shown once and stored only as a hash."""

import hashlib
import secrets
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict, Field

from servicekit.command_line import print_line
from steplog.settings import POSITIONAL


class KeySettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tenant: str = Field(
        description="tenant of the key: letters, digits, - and _",
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        json_schema_extra=POSITIONAL,
    )


def make(settings: KeySettings, say: Callable[[str], None] = print_line) -> None:
    """Print a new key, and its line for the file of `steplog gateway --keys-file`."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    say(f"key for the client (it is not shown again): {key}")
    say(
        f"line for the keys file: {settings.tenant}:sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    )
