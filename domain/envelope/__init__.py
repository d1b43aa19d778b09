"""The PrismEnvelope: built for what is sent, opened for what is received, indexed for search (RFC-037)."""
