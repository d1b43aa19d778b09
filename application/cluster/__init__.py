"""Control plane, runners and proxies of a cluster (RFC-049), and its clients."""
