"""The page of runs under way, served over HTTP: what it reads are their run directories alone.

Two addresses are answered, /TOKEN/ with the page and /TOKEN/state with what is new; no address is
ever taken for the name of a file. Clients are few, and none of them is waited for long.
"""

import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mpitrain.report.recorded_run import RecordedRun, RunReader

LOOK_S = 0.5  # between two looks at the files
MOST_CLIENTS = 16  # at once
ASKED_S = 5.0  # within which a client has to say what it wants
SENT_S = 60.0  # within which it has to take the answer
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


# of runs, what curves are drawn over, and a version
Maker = Callable[[Sequence[RecordedRun], str, str], str]


class LiveRuns:
    """What is shown of some runs, rebuilt when a file has changed. Makers: page() and state()."""

    def __init__(self, readers: Sequence[RunReader], over: str, make_page: Maker, make_state: Maker):
        self._readers = readers
        self._over = over
        self._make_page = make_page
        self._make_state = make_state
        self._lock = threading.Lock()  # several threads ask
        self._looked = -LOOK_S
        self._version = ""
        self._made: dict[Maker, bytes] = {}

    def page(self) -> bytes:
        """Return the page."""
        return self._newest(self._make_page)[1]

    def state(self, known: str) -> bytes | None:
        """Return what has changed since a version that a page knows; None if nothing has."""
        version, content = self._newest(self._make_state)
        return None if hmac.compare_digest(version.encode(), known.encode()) else content

    def _newest(self, make: Maker) -> tuple[str, bytes]:
        with self._lock:
            if time.monotonic() - self._looked >= LOOK_S:
                seen = repr([reader.seen() for reader in self._readers]).encode()
                version = hashlib.sha256(seen).hexdigest()[:16]
                self._looked = time.monotonic()
                if version != self._version:
                    self._version, self._made = version, {}
            if make not in self._made:
                runs = [reader.read() for reader in self._readers]
                self._made[make] = make(runs, self._over, self._version).encode(errors="replace")
            return self._version, self._made[make]


class PageServer(ThreadingHTTPServer):
    """Answers those who know the token. Raises OSError if the address can't be used."""

    daemon_threads = True

    def __init__(self, host: str, port: int, token: str, runs: LiveRuns):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.prefix = f"/{token}/".encode()
        self.runs = runs
        self._free = threading.BoundedSemaphore(MOST_CLIENTS)
        super().__init__((host, port), PageRequest)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or hang up if there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that are gone."""


class PageRequest(BaseHTTPRequestHandler):
    """One request: GET alone is known."""

    server: PageServer
    server_version, sys_version = "mpitrain", ""
    error_content_type, error_message_format = "text/plain; charset=utf-8", "%(code)d\n"

    def setup(self) -> None:
        """Give the client some seconds."""
        super().setup()
        self._within(ASKED_S)

    def finish(self) -> None:
        """Close the connection."""
        self._timer.cancel()
        with suppress(OSError):  # the client may be gone
            super().finish()

    def _within(self, seconds: float) -> None:
        """Hang up unless the request is over by then, however often a byte comes."""
        if hasattr(self, "_timer"):
            self._timer.cancel()
        self._timer = threading.Timer(seconds, self._hang_up)
        self._timer.daemon = True
        self._timer.start()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        """Answer with the page or with what is new."""
        self._within(SENT_S)
        asked = self.path.encode(errors="replace")
        prefix = self.server.prefix
        if not hmac.compare_digest(asked[: len(prefix)], prefix):
            return self.send_error(HTTPStatus.NOT_FOUND)
        place = asked[len(prefix) :]
        if place == b"":
            return self._send(self.server.runs.page(), "text/html; charset=utf-8")
        if place != b"state":
            return self.send_error(HTTPStatus.NOT_FOUND)
        content = self.server.runs.state(self.headers.get("If-None-Match", ""))
        if content is not None:
            return self._send(content, "application/json")
        self.send_response(HTTPStatus.NOT_MODIFIED)
        self.end_headers()

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *what: object) -> None:
        """Say nothing: the address has the token."""
