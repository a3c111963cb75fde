"""Server of the page during a run, for this machine only, and only for clients that know the address's random part."""

from __future__ import annotations

import http.server
import json
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from sordino.errors import SordinoError, UsageError
from sordino.record.reading import Reader
from sordino.report.page.build import page, policy, title_of
from sordino.report.page.contents import contents

HOST = "127.0.0.1"


class LiveServer(http.server.ThreadingHTTPServer):
    """Server of one page and its updates.

    Args:
        readers: readers of the runs that are shown.
        port: port to listen on; 0 for any free one.

    Raises:
        UsageError: the port is taken or not permitted.
    """

    daemon_threads = True

    def __init__(self, readers: Sequence[Reader], port: int = 0) -> None:
        self._readers, self._looking = list(readers), threading.Lock()
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UsageError(f"--port {port}: cannot be opened: {error}. Omit it to use any free port") from error

    @property
    def address(self) -> str:
        """Address to open in a browser."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def is_meant(self, host: str) -> bool:
        """Return whether a request names this server. A foreign page may bind its own host name to this address."""
        return host in (f"{HOST}:{self.server_port}", f"localhost:{self.server_port}")

    def shown(self) -> list[dict[str, Any]]:
        """Return the current contents of the page."""
        with self._looking:
            for reader in self._readers:
                reader.update()
            return [contents(reader) for reader in self._readers]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "sordino", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """Answer with the page or its updates."""
        _, _, asked = self.path.partition("/")
        token, _, what = asked.partition("/")
        known = secrets.compare_digest(token.encode(), self.server.token.encode())
        news = what == "data.json"
        if not known or not self.server.is_meant(self.headers.get("Host", "")) or not (news or asked == token + "/"):
            self._answer(404, "text/plain; charset=utf-8", "Not found. Copy the whole address.\n")
            return
        try:
            runs = self.server.shown()
        except SordinoError as error:
            self._answer(200 if news else 500, "application/json", json.dumps({"error": str(error)}))
            return
        if not news:
            self._answer(200, "text/html; charset=utf-8", page(runs, live=True))
        else:
            found = {"title": title_of([run["name"] for run in runs]), "live": True, "runs": runs}
            self._answer(200, "application/json", json.dumps(found, separators=(",", ":"), allow_nan=False))

    def _answer(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(data))),
            ("Content-Security-Policy", policy(live=True) + "; frame-ancestors 'none'"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because an address with its token must not get into logs."""
