"""Serves the key-value store of a job, which is compatible with Horovod's rendezvous server.

Every path begins with the job's prefix. In addition to Horovod's requests, a PUT with
`If-None-Match: *` does not overwrite an existing value, and returns status 412 if that value
differs; a GET with `Prefer: wait=SECONDS` waits for a value, or with the key `?count=N` until a
scope has N values. Rank 0 runs this module as a process that outlives rank 0, so the module imports
no other module of the package.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

LONGEST_VALUE_BYTES = 2**20
REQUEST_TIMEOUT_S = 10.0
LONGEST_END_S = 10.0
"""Time after the end of rank 0 within which other ranks must write their exit status."""
POLL_S = 0.1
BACKLOG = 1024
JOB_HEADER = "Tfposeidon-Job"
COUNT = "?count="
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
    """Key-value store of one job, which answers on a listening socket in `serving()`."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, identity: str, prefix: str) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.identity = identity
        self.prefix = prefix
        self.is_ending = False
        self._values: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        self._changed = threading.Condition()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores an interrupted or malformed request, which concerns its client only."""

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Answers requests on a thread until the context ends."""
        threading.Thread(target=self.serve_forever, args=(POLL_S,), daemon=True).start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()

    def put(self, scope: str, key: str, value: bytes, *, keep: bool = False) -> bytes:
        """Stores a value, or with `keep` retains an existing one; returns the key's value."""
        with self._changed:
            if not keep:
                self._values[scope][key] = value
            self._changed.notify_all()
            return self._values[scope].setdefault(key, value)

    def get(self, scope: str, key: str, wait_s: float = 0.0) -> bytes | None:
        """Returns a value, or a scope as JSON (`?count=N`), or `None` if missing after `wait_s`."""
        with self._changed:
            values = self._values[scope]
            if not key.startswith(COUNT):
                self._changed.wait_for(lambda: key in values, wait_s)
                return values.get(key)
            count = int(key.removeprefix(COUNT))
            # Stop waiting if the job is ending, because no more ranks register.
            self._changed.wait_for(lambda: self.is_ending or len(values) >= count, wait_s)
            found = {key: json.loads(value) for key, value in values.items()}
            return json.dumps(found).encode() if len(found) >= count else None

    def delete(self, scope: str, key: str) -> None:
        with self._changed:
            self._values[scope].pop(key, None)

    def wait_for_exit_statuses(self, size: int, limit_s: float = LONGEST_END_S) -> None:
        """Marks the job as ending, and waits up to `limit_s` for the exit statuses of all ranks."""
        expected = {EXIT_STATUS.format(rank) for rank in range(size)}
        with self._changed:
            self.is_ending = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: expected <= self._values[FAILURES].keys(), limit_s)

    def report_end(self, rank: int, text: str) -> None:
        """Stores `text` as the first cause, unless one exists or the rank has an exit status."""
        if self.get(FAILURES, EXIT_STATUS.format(rank)) is None:
            self.put(FAILURES, FIRST_FAILURE, json.dumps(text).encode(), keep=True)


class _Handler(BaseHTTPRequestHandler):
    server: Store
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _answer(self, find: Callable[[str, str], tuple[HTTPStatus, bytes]]) -> None:
        prefix, _, path = self.path.removeprefix("/").partition("/")
        scope, _, key = path.partition("/")
        # Horovod appends a port to the prefix (see `rendezvous.horovod_variables`).
        is_member = hmac.compare_digest(prefix.partition(":")[0], self.server.prefix)
        status, body = find(scope, key) if is_member else (HTTPStatus.FORBIDDEN, b"")
        # Refuse requests while this job ends, because a restarted job must wait for its own store.
        # Check this after `find`, in which a GET may wait until this job begins to end.
        if self.server.is_ending and not (is_member and scope == FAILURES):
            status, body = HTTPStatus.SERVICE_UNAVAILABLE, b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header(JOB_HEADER, quote(self.server.identity, safe=" :,.-_"))
        self.end_headers()
        self.wfile.write(body)

    def _get(self, scope: str, key: str) -> tuple[HTTPStatus, bytes]:
        wait_s = float(self.headers.get("Prefer", "wait=0").removeprefix("wait="))
        value = self.server.get(scope, key, wait_s)
        return (HTTPStatus.NOT_FOUND, b"") if value is None else (HTTPStatus.OK, value)

    def _put(self, scope: str, key: str) -> tuple[HTTPStatus, bytes]:
        length = int(self.headers.get("Content-Length", 0))
        if not 0 <= length <= LONGEST_VALUE_BYTES:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, b""
        value = self.rfile.read(length)
        keep = self.headers.get("If-None-Match") == "*"
        found = self.server.put(scope, key, value, keep=keep)
        # An equal value is a success, because a client repeats a request whose answer was lost.
        return HTTPStatus.OK if found == value else HTTPStatus.PRECONDITION_FAILED, found

    def _delete(self, scope: str, key: str) -> tuple[HTTPStatus, bytes]:
        self.server.delete(scope, key)
        return HTTPStatus.OK, b""

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: 404 is the normal answer to a rank that waits."""


def loopback_address(host: str) -> str:
    """Returns the address at which processes on `host` reach a store on `host`."""
    # Do not use the name, which may resolve to the address of a service. Debian's 127.0.1.1 is a
    # different loopback address from 127.0.0.1.
    return host if host.startswith("127.") else "127.0.0.1"


def listen(host: str, ports: Sequence[int], identity: str, token: str | None) -> Store:
    """Returns a store on the first free port, on all interfaces unless the host is a loopback.

    Raises `OSError` if other programs use all ports.
    """
    bind_to = host if host == loopback_address(host) else ""
    for port in ports:
        try:
            listener = socket.create_server((bind_to, port), backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return Store(listener, identity, prefix_of(identity, token))
    raise OSError(
        errno.EADDRINUSE,
        f"The store of rank 0 requires a free port. Received: port(s) {', '.join(map(str, ports))},"
        " which other programs use. Set TFPOSEIDON_PORT to a free one on all ranks",
    )


def start_process(store: Store, size: int) -> subprocess.Popen[str]:
    """Passes a store to a process that outlives this process, which is rank 0."""
    # Start a new session, so that signals to a process group do not end the store before the ranks.
    # Isolate Python (-I -S): it must import neither TensorFlow nor a module of the script's folder
    # that has the name of a standard module.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        cwd="/",
        pass_fds=[store.fileno()],
    )
    assert process.stdin is not None
    # Pass the prefix through a pipe, because every user can read command lines.
    with process.stdin, store:
        place = [os.getpid(), size, store.fileno(), store.identity, store.prefix]
        json.dump(place, process.stdin)
    return process


def main() -> None:
    """Serves the job that standard input describes until all ranks have ended."""
    parent, size, descriptor, identity, prefix = json.load(sys.stdin)
    store = Store(socket.socket(fileno=descriptor), identity, prefix)
    with store.serving():
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
