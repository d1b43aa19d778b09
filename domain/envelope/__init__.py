"""Building, opening, validation and indexing of `PrismEnvelope` (RFC-037)."""
