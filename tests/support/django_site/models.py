"""A table that tasks write to."""

from django.db import models


class Order(models.Model):  # type: ignore[misc] # Django has no types
    id = models.BigAutoField(primary_key=True)
    name = models.TextField()
    text = models.TextField(default="")
