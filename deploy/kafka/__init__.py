"""One Apache Kafka on this machine, to try things on: `make kafka`. A cluster is docs/kafka.md."""
