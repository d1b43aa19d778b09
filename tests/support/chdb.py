"""Folders of chdb that stay open between clients, because opening takes as long as many statements."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import clickhouse_connect
import pytest


class OpenFolder:
    """The folder of chdb that this process opened last; a process can have one open."""

    def __init__(self) -> None:
        self._create_client = clickhouse_connect.get_client
        self._path: str | None = None
        self._client: Any = None

    def close(self) -> None:
        """Close the folder, so that another process can open it, or it can be copied."""
        if self._client is not None:
            self._client.close()
        self._path = self._client = None

    def get_client(self, **options: Any) -> Any:
        """Return a new client; the folder stays open until a client of another one is created."""
        if options["path"] != self._path:
            self.close()
            self._path = options["path"]
            self._client = self._create_client(interface="chdb", path=self._path)
        return self._create_client(**options)


@contextmanager
def open_folder() -> Iterator[OpenFolder]:
    """Have folders stay open while the context lasts."""
    folder = OpenFolder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clickhouse_connect, "get_client", folder.get_client)
        yield folder
        folder.close()
