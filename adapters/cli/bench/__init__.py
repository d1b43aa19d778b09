"""Measurements of this machine through the public handlers: what `postroom bench` runs."""
