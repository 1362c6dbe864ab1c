"""Requests of a rank to the store of its job."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import unquote

from tfposeidon.peers.sources import HOST, PORT, TOKEN, Job
from tfposeidon.peers.store import JOB_HEADER, LONGEST_WAIT_S, address_at_home, prefix_of

T = TypeVar("T")
TIMEOUT_S = 10.0
"""Longest silence of a store."""
RETRY_S = 0.2


class EndingError(ConnectionError):
    """Error of a request to a store whose job is ending."""


@dataclass(frozen=True)
class Answer:
    """Answer of a store, the job that it serves, and the address from which it was asked."""

    status: int
    body: bytes
    job: str
    own_address: str

    def value(self) -> Any:
        """Returns the body, which is JSON."""
        return json.loads(self.body)


@dataclass(frozen=True)
class Client:
    """Connection data of a store, and the address of this host from which it is reached."""

    host: str
    port: int
    prefix: str
    local_address: str = ""

    def put_first(self, scope: str, key: str, value: Any) -> Any:
        """Stores a value unless there is one; returns the value that is there now."""
        body = json.dumps(value).encode()
        return self.request("PUT", f"{scope}/{key}", body, {"If-None-Match": "*"}).value()

    def get(self, scope: str, key: str, wait_s: float = 0.0) -> Any:
        """Returns a value as soon as it exists, or `None` after `wait_s`, at most 30 s."""
        answer = self.request("GET", f"{scope}/{key}", wait_s=wait_s)
        return answer.value() if answer.status == HTTPStatus.OK else None

    def all(self, scope: str, count: int, wait_s: float = 0.0) -> dict[int, Any] | None:
        """Returns the values in a scope once there are `count` of them; `None` after `wait_s`."""
        found = self.get(scope, f"?count={count}", wait_s)
        return found and {int(rank): json.loads(value) for rank, value in found.items()}

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> Answer:
        """Returns the answer to a request; raises `OSError` if there is none, or the job ends."""
        wait_s = max(0.0, min(wait_s, LONGEST_WAIT_S))
        headers = {"Prefer": f"wait={wait_s:.3f}", **(headers or {})}
        # Not urllib, which would send requests to the proxy of `http_proxy`.
        connection = http.client.HTTPConnection(self.host, self.port, timeout=wait_s + TIMEOUT_S)
        try:
            connection.connect()
            own = connection.sock.getsockname()[0]
            connection.request(method, f"/{self.prefix}:0/{path}", body, headers)
            answer = connection.getresponse()
            # Read in any case, which closes the connection.
            body = answer.read()
            if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
                raise EndingError("its job is ending")
            job = unquote(answer.getheader(JOB_HEADER) or "")
            return Answer(answer.status, body, job, own)
        except http.client.HTTPException as error:
            raise ConnectionError(f"no answer of HTTP: {error!r}") from error
        finally:
            connection.close()


def connect(job: Job, token: str | None, timeout_s: float) -> Client:
    """Returns a client of the job's store as soon as it answers.

    Raises `PermissionError` for a wrong token, and `TimeoutError` with the addresses that were
    tried and what was found there.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = [*_attempts(job, token)]
        if isinstance(found[-1], Client):
            return found[-1]
        if time.monotonic() > deadline:
            problems = "; ".join(map(str, found))
            raise TimeoutError(
                f"All processes of a job must reach the store of {job.unit} 0 within its start "
                f"timeout. Received: {problems}, for {timeout_s:g} s. Check that "
                f"{job.name_of(0)} has started and that no firewall or network policy closes the "
                f"port; {HOST} and {PORT} choose another address.{job.hint}"
            )
        time.sleep(RETRY_S)


def running_or(job: Job, token: str | None, start: Callable[[], T]) -> Client | T:
    """Returns a client of the job's store if it runs on this host, else the result of `start`."""
    if client := running(job, token):
        return client
    try:
        return start()
    except OSError:
        # A second process 0 may have started it at the same time.
        if client := running(job, token):
            return client
        raise


def running(job: Job, token: str | None) -> Client | None:
    """Returns a client of the job's store if it runs on this host already."""
    *_, last = _attempts(replace(job, host=address_at_home(job.host)), token)
    return last if isinstance(last, Client) else None


def _attempts(job: Job, token: str | None) -> Iterator[Client | str]:
    """Tries each address; yields the problem of each, and ends with a client if one answers."""
    prefix = prefix_of(job.identity, token)
    for port in job.ports:
        where = f"{job.host}:{port}"
        try:
            # Only IPv4, as Horovod; the address is the same in all later connections.
            client = Client(socket.gethostbyname(job.host), port, prefix)
            answer = client.request("GET", "ranks/?count=0")
        except OSError as error:
            yield f"no answer at {where} ({error})"
            continue
        if answer.status == HTTPStatus.OK:
            yield replace(client, local_address=answer.own_address)
            return
        if answer.job == job.identity:
            raise PermissionError(
                f"All processes of a job must have the same token. Received: the store at {where} "
                f"refused that of {job.name_of(job.rank)}. Set {TOKEN}, or the file of "
                f"{TOKEN}_FILE, to the same value on all of them."
            )
        served = answer.job or "another program"
        yield f"another job at {where} ({served}; this job is {job.identity})"
