"""A network between a client and its server that can fail in the ways that networks do."""

import socket
from contextlib import suppress
from threading import Event, Thread
from types import TracebackType
from urllib.parse import urlsplit


class Proxy:
    """Pass bytes on between clients and the server at `url`, until told otherwise."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._clients: list[socket.socket] = []
        self._servers: list[socket.socket] = []
        self._threads: list[Thread] = []
        self._requests = Event()
        self._requests.set()
        self._answers = Event()
        self._answers.set()
        user = f"{parts.username}@" if parts.username else ""
        self.url = parts._replace(netloc=f"{user}127.0.0.1:{self._listener.getsockname()[1]}").geturl()
        self._start(self._accept)

    @property
    def connections(self) -> int:
        """Return the number of connections that clients have opened."""
        return len(self._clients)

    def hold_requests(self) -> None:
        """Keep back what clients say from now on."""
        self._requests.clear()

    def release(self) -> None:
        """Pass on what was kept back, and all that follows."""
        self._requests.set()
        self._answers.set()

    def hold_answers(self) -> None:
        """Keep back what the server says from now on."""
        self._answers.clear()

    def cut(self) -> None:
        """End the clients' connections; the server isn't told."""
        for client in tuple(self._clients):  # not those that reconnect meanwhile
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        self.release()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        for each in (self._listener, *self._clients, *self._servers):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._clients.append(client)
                self._servers.append(server)
                self._start(self._ask, client, server)
                self._start(self._answer, server, client)

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while said := client.recv(65_536):
                self._requests.wait()
                server.sendall(said)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while said := server.recv(65_536):
                self._answers.wait()
                client.sendall(said)
            client.shutdown(socket.SHUT_RDWR)

    def _start(self, function: object, *arguments: socket.socket) -> None:
        self._threads.append(Thread(target=function, args=arguments))  # type: ignore[arg-type]
        self._threads[-1].start()
