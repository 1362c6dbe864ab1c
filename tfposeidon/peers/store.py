"""Serves the key-value store of a job, which is compatible with Horovod's rendezvous server.

Every path begins with the job's prefix. In addition to Horovod's requests, a PUT with
`If-None-Match: *` does not overwrite an existing value, and returns status 412 if that value
differs; a GET with `Prefer: wait=SECONDS` waits for a value, or with `?count=N` until a scope has N
values. Rank 0 runs this module as a process that outlives rank 0, so the module imports no other
module of the package.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

LONGEST_VALUE_BYTES = 2**20
LONGEST_WAIT_S = 30.0
REQUEST_TIMEOUT_S = 10.0
LONGEST_END_S = 10.0
"""Time after the end of rank 0 within which other ranks must write their exit status."""
BIND_S = 15.0
"""Time to wait for a port that the store of an earlier start may still hold."""
POLL_S = 0.1
JOB_HEADER = "Tfposeidon-Job"
FAILURES = "tfposeidon"
"""Scope in which ranks store their exit status and the first cause of failure."""
FIRST_FAILURE = "first-failure"
EXIT_STATUS = "exit-status-of-rank-{}"


def prefix_of(identity: str, token: str | None) -> str:
    """Returns the prefix of a job's paths, which is secret only if the job has a token.

    >>> prefix_of("TF_CONFIG a:1", None) == prefix_of("TF_CONFIG b:1", None)
    False
    """
    return hmac.new((token or "").encode(), identity.encode(), hashlib.sha256).hexdigest()[:32]


class Store(ThreadingHTTPServer):
    """Key-value store of one job: listens once it is constructed, and answers in `serving()`."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], identity: str, prefix: str) -> None:
        super().__init__(address, _Handler)
        self.identity = identity
        self.prefix = prefix
        self.is_ending = False
        self._values: dict[str, dict[str, bytes]] = {}
        self._changed = threading.Condition()

    def server_bind(self) -> None:
        """Binds the address without looking up its name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores an interrupted or malformed request, which concerns its client only."""

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Answers requests on a thread until the context ends."""
        thread = threading.Thread(target=self.serve_forever, args=(POLL_S,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()

    def put(self, scope: str, key: str, value: bytes, *, keep: bool = False) -> bytes:
        """Stores a value, unless `keep` and the key has one; returns the key's value."""
        with self._changed:
            values = self._values.setdefault(scope, {})
            if not (keep and key in values):
                values[key] = value
            self._changed.notify_all()
            return values[key]

    def get(self, scope: str, key: str, wait_s: float = 0.0) -> bytes | None:
        """Returns a value as soon as it exists, or `None` after `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values.get(scope, {}), wait_s)
            return self._values.get(scope, {}).get(key)

    def all(self, scope: str, count: int, wait_s: float = 0.0) -> dict[str, str] | None:
        """Returns the values of a scope once it has `count` of them, or `None` after `wait_s`."""
        with self._changed:
            values = self._values.setdefault(scope, {})
            # Stop waiting if the job is ending, because no more ranks register.
            self._changed.wait_for(lambda: self.is_ending or len(values) >= count, wait_s)
            if len(values) < count:
                return None
            return {key: value.decode() for key, value in values.items()}

    def delete(self, scope: str, key: str) -> None:
        with self._changed:
            self._values.get(scope, {}).pop(key, None)

    def wait_for_exit_statuses(self, size: int, limit_s: float = LONGEST_END_S) -> None:
        """Marks the job as ending, and waits up to `limit_s` for the exit statuses of all ranks."""
        with self._changed:
            self.is_ending = True
            self._changed.notify_all()
        deadline = time.monotonic() + limit_s
        for rank in range(size):
            self.get(FAILURES, EXIT_STATUS.format(rank), max(0.0, deadline - time.monotonic()))

    def report_end(self, rank: int, text: str) -> None:
        """Stores `text` as the first cause, unless one exists or the rank has an exit status."""
        if self.get(FAILURES, EXIT_STATUS.format(rank)) is None:
            self.put(FAILURES, FIRST_FAILURE, json.dumps(text).encode(), keep=True)


class _Handler(BaseHTTPRequestHandler):
    server: Store
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        if (place := self._place()) is None:
            return
        scope, key, count = place
        wait_s = min(_seconds(self.headers.get("Prefer", "")), LONGEST_WAIT_S)
        if count is None:
            value = self.server.get(scope, key, wait_s)
        else:
            values = self.server.all(scope, count, wait_s)
            value = None if values is None else json.dumps(values).encode()
            if self._refuses_start():
                return
        if value is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, value)

    def do_PUT(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if (place := self._place()) is None:
            return
        if not 0 <= length <= LONGEST_VALUE_BYTES:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        scope, key, _ = place
        value = self.rfile.read(length)
        keep = self.headers.get("If-None-Match") == "*"
        if keep and scope != FAILURES and self._refuses_start():
            return
        found = self.server.put(scope, key, value, keep=keep)
        # An equal value is a success, because a client repeats a request whose answer was lost.
        self._answer(HTTPStatus.OK if found == value else HTTPStatus.PRECONDITION_FAILED, found)

    def do_DELETE(self) -> None:
        if place := self._place():
            self.server.delete(*place[:2])
            self._answer(HTTPStatus.OK)

    def _place(self) -> tuple[str, str, int | None] | None:
        """Returns scope, key and count of the path, or refuses the request and returns `None`."""
        path = urlsplit(self.path)
        prefix, _, rest = path.path.removeprefix("/").partition("/")
        # Horovod appends a port to the prefix (see `rendezvous.horovod_variables`).
        if not hmac.compare_digest(prefix.partition(":")[0], self.server.prefix):
            # A restart of a job that is ending may have another token, and must wait.
            if not self._refuses_start():
                self._answer(HTTPStatus.FORBIDDEN)
            return None
        scope, _, key = rest.partition("/")
        count = parse_qs(path.query).get("count")
        return scope, key, int(count[0]) if count else None

    def _refuses_start(self) -> bool:
        """Refuses a request if the job is ending: a restarted job must wait for its own store."""
        if self.server.is_ending:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE)
        return self.server.is_ending

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header(JOB_HEADER, quote(self.server.identity, safe=" :,.-_"))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: 404 is the normal answer to a rank that waits."""


def _seconds(preferences: str) -> float:
    name, _, value = preferences.partition("=")
    return float(value) if name == "wait" else 0.0


def loopback_address(host: str) -> str:
    """Returns the address at which processes on `host` reach the store there."""
    # Do not use the name, which may resolve to the address of a service. Debian's 127.0.1.1 is a
    # different loopback address from 127.0.0.1.
    return host if host.startswith("127.") else "127.0.0.1"


def listen(host: str, ports: Sequence[int], identity: str, token: str | None) -> Store:
    """Returns a store on the first free port, on all interfaces unless the host is a loopback.

    Raises `OSError` if other programs use all ports.
    """
    bind_to = host if host == loopback_address(host) else ""
    deadline = time.monotonic() + BIND_S
    while True:
        for port in ports:
            try:
                return Store((bind_to, port), identity, prefix_of(identity, token))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        if time.monotonic() > deadline:
            raise OSError(
                errno.EADDRINUSE,
                "The store of rank 0 requires a free port. Received: port(s) "
                f"{', '.join(map(str, ports))}, which other programs use. Set TFPOSEIDON_PORT to a "
                "free one on all ranks",
            )
        time.sleep(POLL_S)


def start_process(
    host: str, ports: Sequence[int], identity: str, token: str | None, size: int
) -> tuple[subprocess.Popen[str], int]:
    """Starts a store that outlives this process, which is rank 0; returns process and port."""
    # Start a new session, so that signals to a process group do not end the store before the ranks.
    # Isolate Python (-I -S): it must import neither TensorFlow nor a module of the script's folder
    # that has the name of a standard module.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        cwd="/",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    # Pass the token through a pipe, because every user can read command lines.
    with process.stdin, process.stdout:
        json.dump([os.getpid(), size, host, ports, identity, token], process.stdin)
        process.stdin.close()
        answer = json.loads(process.stdout.read() or '"the process of the store ended"')
    if isinstance(answer, str):
        raise OSError(answer)
    return process, answer


def main() -> None:
    """Serves the job that standard input describes until all ranks have ended."""
    parent, size, *place = json.load(sys.stdin)
    try:
        store = listen(*place)
    except OSError as error:
        json.dump(error.strerror, sys.stdout)
        return
    with store.serving():
        json.dump(store.server_address[1], sys.stdout)
        sys.stdout.close()
        os.close(1)
        while os.getppid() == parent:
            time.sleep(POLL_S)
        store.report_end(
            0,
            f"rank 0 (process {parent}) ended without a message: it may have been killed (out of "
            "memory?).",
        )
        store.wait_for_exit_statuses(size)


if __name__ == "__main__":
    main()
