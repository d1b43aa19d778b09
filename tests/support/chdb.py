"""Folders of chdb that stay open between clients, because opening takes as long as many statements."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import clickhouse_connect
import pytest
from clickhouse_connect.driver._chdbclient import ChdbClient


class OpenFolder:
    """The folder of chdb that this process opened last; a process can have one open."""

    def __init__(self) -> None:
        self._create_client = clickhouse_connect.get_client
        self._path: str | None = None
        self._client: Any = None
        self._ask = ChdbClient._init_common_settings
        self._apply = ChdbClient._apply_init_result
        self._answer: Any = None

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

    def init_settings(self, client: ChdbClient, tz_source: Any) -> None:
        """Give a client the settings that the first one read, which takes a twentieth of a second."""
        if self._answer is None:
            self._ask(client, tz_source)
        else:
            self._apply(client, self._answer)

    def apply_settings(self, client: ChdbClient, answer: Any) -> None:
        """Remember what the first client read."""
        self._answer = answer
        self._apply(client, answer)


@contextmanager
def open_folder() -> Iterator[OpenFolder]:
    """Have folders stay open while the context lasts."""
    folder = OpenFolder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clickhouse_connect, "get_client", folder.get_client)
        patch.setattr(ChdbClient, "_init_common_settings", lambda *given: folder.init_settings(*given))
        patch.setattr(ChdbClient, "_apply_init_result", lambda *given: folder.apply_settings(*given))
        yield folder
        folder.close()
