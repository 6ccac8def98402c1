"""The real command, which kills itself when its consumer reaches a stage for the N-th time.

python -m tests.reward.dying STAGE N reward --function …
"""

import functools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pool.connection import Connection
from pool.consumers.consumer import StatefulConsumer
from reward.worker import worker
from steplog import cli
from tests import processes
from tests.conftest import free_port
from tests.pool.copier import suicide
from tests.reward.running import RunningWorker
from tests.steplog.command import reaching


@contextmanager
def dying_worker(
    connection: Connection, stage: str, count: int, *options: str
) -> Iterator[RunningWorker]:
    """As `running_worker`, but it kills itself."""
    port = free_port()
    command = [sys.executable, "-m", "tests.reward.dying", stage, str(count), "reward"]
    command += [*reaching(connection), "--port", str(port), *options]
    with tempfile.NamedTemporaryFile(prefix="reward-", suffix=".log", delete=False) as output:
        process = processes.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    worker = RunningWorker(port, process, Path(output.name))
    try:
        yield worker
        worker.log.unlink()
    finally:
        worker.kill()


def main() -> int:
    stage, count, *words = sys.argv[1:]
    probed = functools.partial(StatefulConsumer, probe=suicide(stage, int(count)))
    setattr(worker, "StatefulConsumer", probed)  # noqa: B010 - it is not theirs to export
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main())
