"""Settings of adapters, which can be read without the packages that the adapters need."""

from postroom.adapters.kafka.settings import KafkaSettings
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.adapters.rabbitmq.settings import RabbitmqSettings

__all__ = ["KafkaSettings", "MessagingSettings", "NatsSettings", "RabbitmqSettings"]
