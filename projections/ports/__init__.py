"""Ports of the projections: log readers, read model stores and updaters, and runners."""
