"""A container's health check: exits with 0 when the service on this port says that it is ready.

Python is in every image of ours; curl and wget are not.
"""

import sys
import urllib.request


def main() -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/ready", timeout=4):
        pass


if __name__ == "__main__":
    main()
