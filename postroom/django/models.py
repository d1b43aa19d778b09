"""The table in which `MailboxOutbox` records messages; see `adapters/sql/mailbox_outbox.sql`."""

from typing import ClassVar

from django.db import models


class OutboxMessage(models.Model):  # type: ignore[misc] # Django has no types
    """A message that the owner of its mailbox has not sent yet, or that the mailbox refused."""

    position = models.BigAutoField(primary_key=True)
    message_id = models.TextField(db_column="id")
    mailbox = models.TextField()
    topic = models.TextField()
    message = models.TextField()
    error = models.TextField(null=True)

    class Meta:
        """Postroom's own migrations create the table, and only the owner of the mailbox removes rows."""

        managed = False
        db_table = "outbox_messages"
        default_permissions = ("view",)
        verbose_name = "waiting message"
        ordering: ClassVar = ["position"]

    def __str__(self) -> str:
        return str(self.message_id)
