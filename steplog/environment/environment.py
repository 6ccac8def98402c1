"""The class that authors of environments subclass."""

from collections.abc import Sequence
from typing import NoReturn

from steplog.environment import commands
from steplog.environment.base import BaseEnvironment
from steplog.environment.rollouts.rollout import Item


class Environment(BaseEnvironment[Item]):
    """Tasks for a model, and the rewards for its attempts.

    A subclass needs `collect_trajectory`, and either `get_next_item` or `items`. For settings of
    its own it declares a subclass of EnvironmentSettings with one annotation: `settings:
    MySettings`.
    """

    @classmethod
    def cli(cls, argv: Sequence[str] | None = None) -> NoReturn:
        """The command line of this environment: `serve`, `process` and `evaluate`, with every setting
        as an option."""
        raise SystemExit(commands.main(cls, argv))
