"""What outbox and inbox share: the codec of their events, cleanup, and the backlog in their database."""
