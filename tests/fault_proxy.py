"""A proxy between a client and an S3 or MLflow server, which causes faults in the next requests that match."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

HOP_HEADERS = {"connection", "transfer-encoding", "keep-alive", "content-length"}
SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>%s</Code><Message>injected</Message></Error>'  # S3's form
)
NO_BUCKET = b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>NoSuchBucket</Code><Message>injected</Message></Error>'
KINDS = ("delay", "hang", "500", "503", "cut", "lost response", "truncated", "damaged", "down", "no bucket")
"""Faults: an answer that comes late; none for a long time; an error; a connection that is closed before the request is
forwarded, or after it; half a body; a body with wrong bytes; an outage, in which every request is answered by 503;
no such bucket."""


AT_RANDOM = ("delay", "500", "503", "cut", "lost response", "truncated", "damaged")


@dataclass
class Fault:
    """A fault for the requests that match.

    Attributes:
        method: the request's method; empty for any.
        path: a part of its path and query; empty for any.
        skip: how many matching requests pass first.
        times: how many of the next ones it hits.
        seconds: length of a delay or a hang.
        act: called with each request it hits, before the request is forwarded.
    """

    kind: str
    method: str = ""
    path: str = ""
    skip: int = 0
    times: int = 1
    seconds: float = 0.0
    act: Callable[[], None] = lambda: None
    matched: int = field(default=0, init=False)


class FaultProxy:
    """The proxy, on a free port of loopback, as a context manager.

    Attributes:
        endpoint: its address.
        seen: method and path of each request so far.
        caused: kinds of the faults that `disturb` has caused.
    """

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._faults: list[Fault] = []
        self._outage = self._down_until = 0.0
        self._every = 0
        self.caused: list[str] = []
        self._lock = threading.Lock()
        self._running = 0
        self.seen: list[tuple[str, str]] = []
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def inject(self, kind: str, **where: object) -> Fault:
        """Add a fault for the next requests that match (`Fault`); return it."""
        assert kind in KINDS, kind
        fault = Fault(kind, **where)  # type: ignore[arg-type]
        with self._lock:
            self._faults.append(fault)
        return fault

    def outage(self, seconds: float) -> None:
        """Answer every request with 503 for `seconds` from the next request on, so that slow clients are hit too."""
        with self._lock:
            self._outage, self._down_until = seconds, 0.0

    def disturb(self, share: float) -> None:
        """Cause a fault in this share of all requests from now on, each kind of `AT_RANDOM` in turn."""
        self._every = round(1 / share)

    def clear(self) -> None:
        """End all faults, and forget what has been seen."""
        with self._lock:
            self._faults.clear()
            self.seen.clear()
            self._outage = self._down_until = 0.0

    def hit(self, method: str, path: str) -> Fault | None:
        """Return the fault that hits this request, if one does."""
        with self._lock:
            self.seen.append((method, path))
            if self._outage:
                self._outage, self._down_until = 0.0, time.monotonic() + self._outage
            if time.monotonic() < self._down_until:
                return Fault("down")
            for fault in self._faults:
                if fault.method not in ("", method) or fault.path not in path:
                    continue
                fault.matched += 1
                if fault.skip < fault.matched <= fault.skip + fault.times:
                    return fault
            if self._every and len(self.seen) % self._every == 0:
                self.caused.append(AT_RANDOM[len(self.caused) % len(AT_RANDOM)])
                return Fault(self.caused[-1], seconds=0.5)
        return None

    def settle(self) -> None:
        """Wait until no request is being handled, including those that the client has given up."""
        deadline = time.monotonic() + 300
        while self._running and time.monotonic() < deadline:
            time.sleep(0.02)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a request as being handled."""
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> http.client.HTTPResponse:
        """Send a request to the server; return its response, whose body has not been read."""
        connection = http.client.HTTPConnection(*self._target, timeout=30)
        connection.request(method, path, body=body, headers=headers)
        return connection.getresponse()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: clients are killed here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultProxy

    def log_message(self, *args: object) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        body = self._body()
        with self.owner.running():
            self._answer_to(body)

    def _answer_to(self, body: bytes) -> None:
        fault = self.owner.hit(self.command, self.path)
        kind = fault.kind if fault else ""
        if fault:
            fault.act()
        if kind in ("delay", "hang") and fault:
            time.sleep(fault.seconds)
        if kind in ("500", "503", "down"):
            code = b"InternalError" if kind == "500" else b"SlowDown"
            self._send(500 if kind == "500" else 503, {"Content-Type": "application/xml"}, SLOW_DOWN % code)
            return
        if kind == "no bucket":
            self._send(404, {"Content-Type": "application/xml"}, NO_BUCKET)
            return
        if kind == "cut":
            self.close_connection = True
            return
        # The request's own host is part of its signature, which the test server does not check.
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS}
        response = self.owner.forward(self.command, self.path, headers, body)
        content = response.read()
        if kind == "lost response":
            self.close_connection = True
            return
        kept = {name: value for name, value in response.getheaders() if name.lower() not in HOP_HEADERS}
        length = response.getheader("Content-Length") if self.command == "HEAD" else None
        if kind == "damaged":
            content = content[:-1] + bytes([content[-1] ^ 1]) if content else content
        self._send(response.status, kept, content, cut=kind == "truncated", length=length)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return body

    def _send(
        self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False, length: str | None = None
    ) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the client may have given up
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if status not in (204, 304):
                self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if cut else content)
            self.wfile.flush()
            if cut:
                self.close_connection = True

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _answer
