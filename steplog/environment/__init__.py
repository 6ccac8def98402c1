"""The SDK for environments. It speaks HTTP only: nothing of the services is imported here."""

from steplog.environment.client import Client, Ending, Trajectory
from steplog.environment.environment import Environment
from steplog.environment.errors import EnvironmentFailed, TryAgain
from steplog.environment.group import Group
from steplog.environment.rollout import Agent, Rollout
from steplog.environment.serving import evaluate, process, serve
from steplog.environment.settings import EnvironmentSettings

__all__ = [
    "Agent",
    "Client",
    "Ending",
    "Environment",
    "EnvironmentFailed",
    "EnvironmentSettings",
    "Group",
    "Rollout",
    "Trajectory",
    "TryAgain",
    "evaluate",
    "process",
    "serve",
]
