"""Redrive jobs: changes of the dead letters, or of the waiting messages, of a query."""
