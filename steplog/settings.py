"""One typed settings object per service, from a file, the environment and the command line.

Later sources win: file, then environment, then command line. In the first two, a value for one service
wins over a value for all services.

                  for every service (`ServiceSettings`)        for one service
    file          key = …  at the top level                    key = …  in [service]
    environment   STEPLOG_KEY                                  STEPLOG_SERVICE_KEY
    command line                                               --key

The file is TOML, or YAML if its name says so. A secret may also be in a file that STEPLOG_…_FILE names.
The keys of other services are not checked here, so that no service has to import another one.
"""

import argparse
from collections.abc import Mapping

from pydantic import BaseModel

from pool.settings import ServiceSettings
from servicekit import settings_sources as sources
from servicekit.settings_sources import (
    POSITIONAL,
    Settings,
    SettingsError,
    SettingsScope,
    add_options,
)
from steplog.commands import COMMANDS, load_object

__all__ = ["POSITIONAL", "SERVICES", "SettingsError", "add_options", "load", "settings_class"]

SERVICES = {command.service: command.settings for command in COMMANDS}
"""The settings class of each service, as "module:Class"."""

SHARED = ServiceSettings.model_fields
SCOPE = SettingsScope(SERVICES, SHARED)


def settings_class(service: str) -> type[BaseModel]:
    cls: type[BaseModel] = load_object(SERVICES[service])
    return cls


def load(
    cls: type[Settings], service: str, namespace: argparse.Namespace, environ: Mapping[str, str]
) -> Settings:
    """Merge all sources into the settings of one service."""
    return sources.load(cls, service, namespace, environ, SCOPE)
