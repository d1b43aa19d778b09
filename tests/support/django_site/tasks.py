"""Tasks of the site."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from django.db import transaction

from postroom import Reject, RetryLater
from postroom.django.framework import TaskContext
from tests.support.django_site import BACKPORT
from tests.support.django_site.models import Order

task: Callable[..., Any] = import_module("django_tasks" if BACKPORT else "django.tasks").task


class Declined(Exception):
    """An error of the site."""


@task
def add(a: int, b: int = 0) -> int:
    return a + b


@task
def echo(value: Any) -> Any:
    return value


@task
def place(name: str, text: str = "") -> None:
    Order.objects.create(name=name, text=text)


@task
def place_many(names: list[str]) -> None:
    for name in names:
        place.enqueue(name)


@task
def log(text: Any) -> None:
    Order.objects.create(name="log", text=str(text))


@task
async def aplace(name: str) -> str:
    await Order.objects.acreate(name=name, text="async")
    return name


@task
def decline(name: str) -> None:
    raise Declined(f"{name} was declined")


@task
def find(name: str) -> None:
    Order.objects.get(name=name)


@task
def place_twice() -> None:
    Order.objects.create(pk=1, name="first")
    Order.objects.create(pk=1, name="second")


@task
def leave_open(name: str, error: str | None = None) -> None:
    transaction.atomic().__enter__()
    Order.objects.create(name=name)
    if error is not None:
        raise Declined(error)


@task
def pretend() -> None:
    raise ValueError("1\nantigravity.ValueError: 1")


@task
def reject(reason: str) -> None:
    raise Reject(reason)


@task
def ask_again() -> None:
    raise RetryLater("1h")


@task
def unserializable() -> object:
    return object()


@task(takes_context=True)  # type: ignore[untyped-decorator] # what it returns is unknown
def attempts(context: TaskContext, failures: int) -> list[Any]:
    if context.attempt <= failures:
        raise Declined("not yet")
    return [context.attempt, context.task_result.id, len(context.task_result.worker_ids)]


def not_a_task() -> None:
    raise AssertionError("no message may call it")


def _plain() -> None:
    raise AssertionError("no worker finds it")


renamed = task(_plain)
