"""The real `steplog` command, as a process."""

import os
import subprocess

from pool.connection import Connection
from tests import processes

STEPLOG = processes.STEPLOG


def steplog(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs to its end, with these variables besides our own."""
    environ = {**os.environ, **variables}
    return processes.run([STEPLOG, *words], capture_output=True, text=True, env=environ)


def reaching(connection: Connection) -> list[str]:
    """The options that lead to a test's topics."""
    return ["--bootstrap", connection.bootstrap, "--topic-prefix", connection.topic_prefix]
