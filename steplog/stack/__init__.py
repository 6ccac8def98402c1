"""The local stack: Kafka, engines, gateway, reward workers and trainer, kept running by one process."""
