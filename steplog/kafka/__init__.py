"""The local Kafka broker: its software, its directory, and the process."""
