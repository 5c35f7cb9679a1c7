"""The distributed log: Apache Kafka through confluent-kafka (librdkafka)."""
