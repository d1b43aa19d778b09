"""Incremental updates: batches of log records applied to the read models."""
