"""The software of a local broker: a Java runtime, and Kafka's jars from Maven Central.

Jars are downloaded once per user and Kafka version. They appear in the cache by one rename, so an
interrupted download is never mistaken for a complete one.
"""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from servicekit.errors import Fatal

POM = Path(__file__).with_name("pom.xml")
OLDEST_JAVA = 17


class LocalKafkaError(Fatal):
    """The local broker cannot be started or stopped; the message is one sentence for a person."""


def version() -> str:
    """Kafka's version, as pom.xml states it."""
    match = re.search(r"<kafka\.version>(.+?)</", POM.read_text())
    if not match:
        raise LocalKafkaError(f"{POM} does not state a kafka.version. Install steplog again.")
    return match[1]


def java() -> str:
    """The Java program of JAVA_HOME, or else the first on the PATH."""
    advice = f"Install Java {OLDEST_JAVA} or newer, or set JAVA_HOME to it."
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "java")) if home else "java"
    try:
        output = subprocess.run([program, "-version"], capture_output=True, text=True).stderr
    except OSError as error:
        location = f"in JAVA_HOME ({home})" if home else "on the PATH"
        raise LocalKafkaError(
            f"Kafka needs Java, but there is none {location}. {advice}"
        ) from error
    match = re.search(r'version "((\d+)[^"]*)"', output)
    if not match:
        raise LocalKafkaError(f"`{program} -version` does not print a version. {advice}")
    if int(match[2]) < OLDEST_JAVA:
        raise LocalKafkaError(f"{program} is Java {match[1]}, which is too old for Kafka. {advice}")
    return program


def java_options() -> list[str]:
    """Further options for Java, from the variable that Kafka's own scripts read too."""
    return shlex.split(os.environ.get("KAFKA_OPTS", ""))


def jars() -> Path:
    """The folder of Kafka's jars, which are downloaded if this user does not have this version yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steplog"
    folder = cache / f"kafka-{version()}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=cache) as temporary:
            complete = _download(Path(temporary) / "jars")
            # Another process may have downloaded the same jars at the same time.
            if not folder.is_dir():
                complete.rename(folder)
    except OSError as error:
        raise LocalKafkaError(
            f"Cannot store Kafka's jars in {cache}: {error.strerror}. Set XDG_CACHE_HOME to a folder"
            " that you can write to."
        ) from error
    return folder


def _download(folder: Path) -> Path:
    maven = shutil.which("mvn")
    if not maven:
        raise LocalKafkaError(
            f"Maven (mvn) is needed once, to download Kafka {version()}, but it is not on the PATH."
            " Install Maven."
        )
    # -U: Maven remembers failed downloads and would not retry them.
    command = [maven, "-q", "-B", "-U", "-f", str(POM), "dependency:copy-dependencies"]
    done = subprocess.run(
        [*command, f"-DoutputDirectory={folder}"], capture_output=True, text=True, errors="replace"
    )
    if done.returncode or not folder.is_dir():
        reason = _find_first_error(done.stdout + done.stderr)
        raise LocalKafkaError(
            f"Maven could not download Kafka {version()} ({reason})."
            " Check the network and Maven's settings, then try again."
        )
    return folder


def _find_first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("[ERROR]")]
    return (errors or lines or ["it printed nothing"])[0].removeprefix("[ERROR]").strip()[:300]
