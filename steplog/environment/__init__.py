"""The SDK for environments. It talks to the gateway over HTTP and imports none of the services.

Modules depend on each other downwards only:

    errors, settings
    author_code     calls of the author's methods
    backends/       the gateway's client, any OpenAI-style server, recorded calls
    rollouts/       rollouts and groups
    environment     the base class
    records/        what is shown and stored for people
    running/        groups, their scheduling, the journal, sessions, evaluations
    serving         serve, process, evaluate
    commands        the command line
"""

from steplog.environment.backends.backend import Ending, OpenTrajectory
from steplog.environment.backends.gateway import Client
from steplog.environment.environment import Environment
from steplog.environment.errors import EnvironmentFailed, GatewayLost, GatewayRefused, TryAgain
from steplog.environment.rollouts.agents import Agent
from steplog.environment.rollouts.group import Group
from steplog.environment.rollouts.rollout import Rollout
from steplog.environment.running.evaluation import EvaluationResult
from steplog.environment.serving import evaluate, process, serve
from steplog.environment.settings import EnvironmentSettings

__all__ = [
    "Agent",
    "Client",
    "Ending",
    "Environment",
    "EnvironmentFailed",
    "EnvironmentSettings",
    "EvaluationResult",
    "GatewayLost",
    "GatewayRefused",
    "Group",
    "OpenTrajectory",
    "Rollout",
    "TryAgain",
    "evaluate",
    "process",
    "serve",
]
