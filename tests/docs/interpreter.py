"""Runs Python code as `python FILE` would, in forks of a process that has already imported the clients.

Importing them takes seconds, and the pages have many blocks that use them.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRELOADED = ("anthropic", "openai", "openai.resources.responses")


class Interpreter:
    def __init__(self) -> None:
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, text: str, folder: Path, environ: Mapping[str, str], output: Path) -> int:
        """Returns the exit status; stdout and stderr go to the file `output`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        job = {"text": text, "folder": str(folder), "environ": dict(environ), "to": str(output)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    for name in PRELOADED:
        __import__(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os._exit(_run(json.loads(line)))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


def _run(job: dict[str, Any]) -> int:
    handle = os.open(job["to"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environ"])
    sys.path.insert(0, "")
    status = 0
    try:
        exec(compile(job["text"], "<block>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    main()
