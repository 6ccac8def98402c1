"""Settings and URLs as they may be shown: without passwords.

A SecretStr is shown as stars, and a URL without its user and password.
"""

import re
from typing import Any

from pydantic import BaseModel

LOGIN = re.compile(r"(?<=//)[^/@\s]+(?=@)")
"""The user and password of a URL."""


def format_settings(settings: BaseModel) -> str:
    """The settings as one line of `name=value` pairs."""
    return " ".join(f"{name}={value}" for name, value in mask_settings(settings).items())


def mask_settings(settings: BaseModel) -> dict[str, Any]:
    """Every setting that has a value, with its secrets masked."""
    values = settings.model_dump(mode="json", exclude_none=True)
    return {name: _mask_logins(value) for name, value in values.items()}


def _mask_logins(value: Any) -> Any:
    if isinstance(value, list):
        return [_mask_logins(item) for item in value]
    return LOGIN.sub("***", value) if isinstance(value, str) else value
