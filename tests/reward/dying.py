"""The real command, which kills itself when its consumer reaches a stage for the N-th time.

python -m tests.reward.dying STAGE N reward --function …
"""

import functools
import sys

from pool.consumer import StatefulConsumer
from reward import worker
from steplog import cli
from tests.pool.copier import suicide


def main() -> int:
    stage, count, *words = sys.argv[1:]
    probed = functools.partial(StatefulConsumer, probe=suicide(stage, int(count)))
    setattr(worker, "StatefulConsumer", probed)  # noqa: B010 - it is not theirs to export
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main())
