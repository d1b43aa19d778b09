"""Backups of whole stores: copying, verifying and restoring them (ADR 0056)."""
