"""A worker with 64 consumers, whose handler does nothing."""

from postroom import Worker

TOPIC = "bench"
worker = Worker()


@worker.consumer(TOPIC, concurrency=64)
async def handle(payload: str) -> None:
    """Handle a message."""
