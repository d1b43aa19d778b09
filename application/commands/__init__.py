"""Command handlers: plain async callables that services import."""
