"""The settings that every service shares: the connection to Kafka, logging and tracing."""

from pool.connection import Connection
from servicekit.process import ObservabilitySettings


class ServiceSettings(ObservabilitySettings, Connection):
    """Base class of the settings of every long-running service."""
