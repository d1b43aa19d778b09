"""Redrive jobs: dead letters of a query that are redriven, archived or purged."""
