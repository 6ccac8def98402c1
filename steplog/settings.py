"""One typed settings object per service, from a file, the environment and the command line.

Later sources win: file, then environment, then command line. In each of the first two, what is
given for one service wins over what is given for all.

                  for every service (`ServiceSettings`)        for one service
    file          key = …  at the top level                    key = …  in [service]
    environment   STEPLOG_KEY                                  STEPLOG_SERVICE_KEY
    command line                                               --key

The file is TOML, or YAML by its name. A secret may also stand in a file that STEPLOG_…_FILE names. The
keys of other services are theirs to check, so that no service imports another one to read its settings.
"""

import argparse
from collections.abc import Mapping
from importlib import import_module

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

__all__ = ["POSITIONAL", "SERVICES", "SettingsError", "add_options", "load", "settings_class"]

SERVICES = {
    "kafka": "steplog.kafka.local_kafka:LocalKafkaSettings",
    "topics": "steplog.topics:TopicsSettings",
    "cat": "steplog.cat:CatSettings",
    "gateway": "gateway.settings:GatewaySettings",
    "atropos": "gateway.atropos.settings:AtroposSettings",
    "key": "steplog.key:KeySettings",
    "reward": "reward.settings:RewardSettings",
    "replay-rescore": "reward.settings:RescoreSettings",
    "replay-diff": "replay.settings:DiffSettings",
    "train": "trainer.settings:TrainSettings",
    "export": "trainer.settings:ExportSettings",
    "replay-step": "trainer.replaying.settings:ReplayStepSettings",
    "replay-lineage": "replay.settings:LineageSettings",
    "stack": "steplog.stack.settings:StackSettings",
    "demo": "steplog.demo.settings:DemoSettings",
    "lag": "console.settings:LagSettings",
    "monitor": "console.settings:MonitorSettings",
    "replay-export": "replay.settings:ExportSettings",
    "replay-import": "replay.settings:ImportSettings",
    "replay-delete": "replay.settings:DeleteSettings",
    "env": "steplog.environment.settings:EnvironmentSettings",
}
"""Where each service's settings class is; it is imported when the service is used."""

SHARED = ServiceSettings.model_fields
HOUSE = SettingsScope(SERVICES, SHARED)


def settings_class(service: str) -> type[BaseModel]:
    module, name = SERVICES[service].split(":")
    found: type[BaseModel] = getattr(import_module(module), name)
    return found


def load(
    cls: type[Settings], service: str, namespace: argparse.Namespace, environ: Mapping[str, str]
) -> Settings:
    """Merge all sources into the settings of one service."""
    return sources.load(cls, service, namespace, environ, HOUSE)
