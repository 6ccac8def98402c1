"""`steplog kafka start`, `stop` and `status`."""

from servicekit.command_line import print_line
from steplog.kafka import local_kafka
from steplog.kafka.local_kafka import Broker, LocalKafkaSettings


def start(settings: LocalKafkaSettings) -> None:
    was_running = local_kafka.status(settings.dir) is not None
    broker = local_kafka.start(settings.dir, settings.port, settings.heap)
    print_line(f"{'already running' if was_running else 'started'}: {_describe(broker)}")


def stop(settings: LocalKafkaSettings) -> None:
    broker = local_kafka.stop(settings.dir)
    print_line(f"stopped: {_describe(broker)}" if broker else _not_running(settings))


def status(settings: LocalKafkaSettings) -> int:
    """Exit status 1 when no broker is running."""
    broker = local_kafka.status(settings.dir)
    print_line(f"running: {_describe(broker)}" if broker else _not_running(settings))
    return 0 if broker else 1


def _describe(broker: Broker) -> str:
    return f"Kafka {broker.version} on {broker.bootstrap}, pid {broker.pid}, in {broker.directory}"


def _not_running(settings: LocalKafkaSettings) -> str:
    return f"No broker is running in {settings.dir}."
