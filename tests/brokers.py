"""Java for brokers that live for a test or two: quick to start rather than quick in the long run.

A broker needs ten seconds of CPU until it answers, most of them for the loading of classes. With an
archive of the loaded classes and the first compiler only, it needs three. The first run without an
archive makes it when its broker stops, and later runs use it.
"""

import os
import shutil
import zlib
from pathlib import Path

from steplog.kafka import local_kafka, software

QUICK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
CLASS_PATH_FOLDER = Path(local_kafka.__file__).parent


def java(*words: str) -> list[str]:
    """The command line for a class of Kafka's, with a class path that the archive fits."""
    classes = f"{software.jars()}/*:{CLASS_PATH_FOLDER}"
    return [software.java(), *software.java_options(), "-Xmx512m", "-cp", classes, *words]


def archive() -> Path:
    """It fits one class path only, hence one checkout."""
    checkout = zlib.crc32(os.fsencode(CLASS_PATH_FOLDER))
    return software.jars().with_name(f"test-classes-{software.version()}-{checkout:08x}.jsa")


def set_java_options() -> None:
    """For all brokers that this process and its children start."""
    file = archive()
    options = [*QUICK, f"-XX:SharedArchiveFile={file}"] if file.exists() else list(QUICK)
    os.environ["KAFKA_OPTS"] = " ".join(options)


def start(directory: Path, port: int) -> local_kafka.Broker:
    """The broker of the run; makes the archive when it stops, if there is none."""
    before = os.environ.get("KAFKA_OPTS", "")
    if not archive().exists():
        os.environ["KAFKA_OPTS"] = f"{before} -XX:ArchiveClassesAtExit={directory}.jsa"
    try:
        return local_kafka.start(directory, port)
    finally:
        os.environ["KAFKA_OPTS"] = before


def stop(directory: Path) -> None:
    local_kafka.stop(directory)
    made = Path(f"{directory}.jsa")
    if made.exists():
        copy = archive().with_suffix(f".{os.getpid()}")
        shutil.copy(made, copy)
        copy.rename(archive())
