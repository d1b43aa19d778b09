"""Query handlers: plain async callables that only read."""
