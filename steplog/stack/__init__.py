"""The local stack: Kafka, engines, gateway, reward workers and trainer, supervised by one process."""
