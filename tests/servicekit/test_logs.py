"""Lines of the log as JSON, whoever writes them."""

import json
import subprocess
import sys

PAST_LOGGING = """
import logging, sys, threading, warnings
from servicekit import logs
from steplog import cli
stubborn = logging.getLogger("stubborn")
stubborn.addHandler(logging.StreamHandler())
stubborn.propagate = False
logs.start("gateway", "json", "r")
stubborn.warning("mine\\nand more")
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
cli._fail(1, "no broker")
raise RuntimeError("broken")
"""


def test_what_goes_past_logging_comes_as_json_too() -> None:
    done = subprocess.run([sys.executable, "-c", PAST_LOGGING], capture_output=True, text=True)
    mine, old, thread, sentence, end = map(json.loads, done.stderr.splitlines())
    assert mine["message"] == "mine\nand more" and mine["run"] == "r"
    assert "UserWarning: old" in old["message"]
    assert thread["message"] == "Unhandled exception: ZeroDivisionError"
    assert sentence["message"] == "no broker", "with which a service stops"
    assert end["error"].endswith("RuntimeError: broken") and end["level"] == "CRITICAL"
