"""CloudEvents 1.0: the event, its JSON format, and its forms as messages of brokers (ADR 0091)."""
