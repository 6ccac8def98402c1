"""Container health check: exits with 0 if `/ready` of the service on the given port succeeds.

Written in Python because every image has Python, but not curl or wget.
"""

import sys
import urllib.request


def main() -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/ready", timeout=4):
        pass


if __name__ == "__main__":
    main()
