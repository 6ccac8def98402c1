"""What every command shares: printing a line, and the exit statuses of interrupted programs."""

import sys

INTERRUPTED = 130
BROKEN_PIPE = 141
TERMINATED = 143
"""The statuses that shells report for programs ended by SIGINT, SIGPIPE and SIGTERM."""


def print_line(line: str) -> None:
    """Print at once, also into a pipe: whoever follows the output should not wait for a buffer."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
