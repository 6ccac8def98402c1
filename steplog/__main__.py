"""`python -m steplog` is the `steplog` command.

With `python -P -m steplog` the current folder is not searched for modules, so a user's own `trainer.py`
in it cannot take the place of ours.
"""

import sys

from steplog.cli import main

if __name__ == "__main__":
    sys.exit(main())
