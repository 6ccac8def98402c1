"""The software of a local broker: a Java runtime, and Kafka's jars from Maven Central.

Jars are downloaded once per user and Kafka version. They appear in the cache by one rename, so an
interrupted download is never taken for a whole one.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from servicekit.errors import Fatal

POM = Path(__file__).with_name("pom.xml")
OLDEST_JAVA = 17


class LocalKafkaError(Fatal):
    """A local broker cannot do what was asked; the message is one sentence for a person."""


def version() -> str:
    """Kafka's version, which the Maven file states."""
    found = re.search(r"<kafka\.version>(.+?)</", POM.read_text())
    if not found:
        raise LocalKafkaError(f"{POM} names no kafka.version; install steplog again")
    return found[1]


def java() -> str:
    """The Java program: JAVA_HOME's, else the first on the PATH."""
    advice = f"install Java {OLDEST_JAVA} or newer, or set JAVA_HOME to one"
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "java")) if home else "java"
    try:
        told = subprocess.run([program, "-version"], capture_output=True, text=True)
    except OSError as error:
        where = f"in JAVA_HOME ({home})" if home else "on the PATH"
        raise LocalKafkaError(f"Kafka needs Java, and there is none {where}; {advice}") from error
    found = re.search(r'version "((\d+)[^"]*)"', told.stderr)
    if not found:
        raise LocalKafkaError(f"'{program} -version' tells no version; {advice}")
    if int(found[2]) < OLDEST_JAVA:
        raise LocalKafkaError(f"{program} is Java {found[1]}, too old for Kafka; {advice}")
    return program


def jars() -> Path:
    """The folder of Kafka's jars; downloads them when this user has none of this version."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steplog"
    folder = cache / f"kafka-{version()}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=cache) as temporary:
            whole = _download(Path(temporary) / "jars")
            # Whoever downloaded at the same time and came first has the same jars.
            if not folder.is_dir():
                whole.rename(folder)
    except OSError as error:
        raise LocalKafkaError(
            f"cannot keep Kafka's jars in {cache}: {error.strerror}; set XDG_CACHE_HOME to a folder"
            " that you can write"
        ) from error
    return folder


def _download(folder: Path) -> Path:
    maven = shutil.which("mvn")
    if not maven:
        raise LocalKafkaError(
            f"Maven (mvn) is needed once, to download Kafka {version()}, and it is not on the PATH;"
            " install Maven"
        )
    # -U: Maven remembers failed downloads, and would not try them again.
    command = [maven, "-q", "-B", "-U", "-f", str(POM), "dependency:copy-dependencies"]
    done = subprocess.run(
        [*command, f"-DoutputDirectory={folder}"], capture_output=True, text=True, errors="replace"
    )
    if done.returncode or not folder.is_dir():
        said = _first_error(done.stdout + done.stderr)
        raise LocalKafkaError(
            f"Maven could not download Kafka {version()} ({said});"
            " check the network and Maven's settings, then try again"
        )
    return folder


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("[ERROR]")]
    return (errors or lines or ["it said nothing"])[0].removeprefix("[ERROR]").strip()[:300]
