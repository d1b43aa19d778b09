"""Settings of adapters, which can be read without the packages that the adapters need."""

from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.postgres.messaging.settings import MessagingSettings

__all__ = ["MessagingSettings", "NatsSettings"]
