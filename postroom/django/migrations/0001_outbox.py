"""The tables of `postroom migrate --messaging`, which that command and this migration make alike."""

from typing import Any, ClassVar

from django.db import migrations, models


def create_tables(apps: Any, schema_editor: Any) -> None:
    """Create the tables that a database lacks; one that is neither SQLite nor PostgreSQL needs none."""
    from postroom.django.database import create_tables

    create_tables(schema_editor.connection)


class Migration(migrations.Migration):  # type: ignore[misc] # Django has no types
    """Its reverse keeps the tables, which may hold messages."""

    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        migrations.RunPython(create_tables, migrations.RunPython.noop),
        migrations.CreateModel(
            name="OutboxMessage",
            fields=[
                ("position", models.BigAutoField(primary_key=True, serialize=False)),
                ("message_id", models.TextField(db_column="id")),
                ("mailbox", models.TextField()),
                ("topic", models.TextField()),
                ("message", models.TextField()),
                ("error", models.TextField(null=True)),
            ],
            options={
                "verbose_name": "waiting message",
                "db_table": "outbox_messages",
                "ordering": ["position"],
                "managed": False,
                "default_permissions": ("view",),
            },
        ),
    ]
