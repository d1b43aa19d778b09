"""The app `postroom.django`: the tables, the commands, the checks of databases, and the page of the admin."""

from django.apps import AppConfig
from django.core.checks import Tags, register


class PostroomConfig(AppConfig):  # type: ignore[misc] # Django has no types
    """The app; its label is `postroom`."""

    name = "postroom.django"
    label = "postroom"
    verbose_name = "Postroom"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks that use databases, which `manage.py check --database` and `migrate` run."""
        from postroom.django.checks import check_databases

        register(check_databases, Tags.database)
