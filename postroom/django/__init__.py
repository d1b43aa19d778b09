"""Tasks of Django in a mailbox: a backend of `django.tasks`, its worker, and an app with their commands.

```
INSTALLED_APPS = [..., "postroom.django"]
TASKS = {"default": {"BACKEND": "postroom.django.PostroomBackend"}}
```

Django imports this module before its apps are loaded, so it imports nothing itself.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postroom.django.backend import PostroomBackend

__all__ = ["PostroomBackend"]

if not TYPE_CHECKING:  # a type checker would believe that any name exists

    def __getattr__(name: str) -> Any:
        """Import the backend when it is first used."""
        if name != "PostroomBackend":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from postroom.django.backend import PostroomBackend

        return PostroomBackend
