"""ClickHouse's HTTP interface over chdb, one statement at a time: `python clickhouse_http.py FOLDER PORT`."""

import re
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

OWN = ("session_id", "query_id", "client_protocol_version", "database", "query", "enable_http_compression")
"""Parameters of requests that are no settings."""
_INSERT = re.compile(r"INSERT INTO (\S+) (?:\((.*?)\) )?FORMAT (\w+)\s*\Z", re.DOTALL)


class _Handler(BaseHTTPRequestHandler):
    client: Any

    def do_GET(self) -> None:  # the base class calls it
        """Answer the check whether the server is up."""
        self._answer(200, b"Ok.\n")

    def do_POST(self) -> None:  # the base class calls it
        """Run the statement of the parameter `query`, with the body as data, or that in the body."""
        from clickhouse_connect.driver.exceptions import ClickHouseError

        parameters = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        body = self._body()
        try:
            self._answer(200, self._run(parameters, body))
        except ClickHouseError as error:
            self._answer(500, str(error).encode(), {"X-ClickHouse-Exception-Code": "1"})

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _run(self, parameters: dict[str, str], body: bytes) -> bytes:
        bound = {name[6:]: value for name, value in parameters.items() if name.startswith("param_")}
        settings = {
            name: value
            for name, value in parameters.items()
            if name not in OWN and not name.startswith(("param_", "http_", "send_", "wait_end"))
        }
        statement = parameters.get("query") or body.decode()
        if "query" in parameters and body and (insert := _INSERT.search(statement)):
            table, columns, format_ = insert.groups()
            names = [name.strip(" `") for name in columns.split(",")] if columns else None
            self.client.raw_insert(table, names, body, settings=settings, fmt=format_)
            return b""
        answer: bytes = self.client.raw_query(statement, parameters=bound, settings=settings)
        return answer

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "lz4":
            import lz4.frame  # type: ignore[import-untyped]  # it has no types

            body = lz4.frame.decompress(body)
        return body

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Serve until the process is killed."""
    import clickhouse_connect

    _Handler.client = clickhouse_connect.get_client(interface="chdb", path=sys.argv[1])
    with HTTPServer(("127.0.0.1", int(sys.argv[2])), _Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
