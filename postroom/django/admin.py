"""The page of the admin: messages that wait to be sent, and a link to the console."""

from typing import Any

from django.contrib import admin

from postroom.django.backend import PostroomBackend
from postroom.django.framework import task_backends
from postroom.django.models import OutboxMessage


@admin.register(OutboxMessage)
class OutboxMessageAdmin(admin.ModelAdmin):  # type: ignore[misc] # Django has no types
    """List of the tasks that the owner of the mailbox has not sent yet, or that the mailbox refused."""

    list_display = ("message_id", "topic", "mailbox", "error")
    list_filter = ("topic",)
    search_fields = ("message_id",)
    fields = ("message_id", "mailbox", "topic", "error")

    def has_add_permission(self, request: Any) -> bool:
        """Return False: tasks are enqueued by code."""
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """Return False: only the owner of the mailbox changes rows."""
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        """Return False: only the owner of the mailbox removes rows."""
        return False

    def changelist_view(self, request: Any, extra_context: dict[str, Any] | None = None) -> Any:
        """Show the list, with links to the consoles that the settings name."""
        consoles = [
            (each.mailbox, each.console)
            for each in task_backends.all()
            if isinstance(each, PostroomBackend) and each.console is not None
        ]
        return super().changelist_view(request, {**(extra_context or {}), "consoles": consoles})
