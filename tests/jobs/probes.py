"""Small jobs for the lab, which print a rank's environment, link rates and packet delays."""

import json
import os
import signal
import socket
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

# The default values are for the collection of tests, which imports this module without a job.
RANK, SIZE = int(os.environ.get("HOROVOD_RANK", 0)), int(os.environ.get("HOROVOD_SIZE", 1))
PORT = 5000


def environment():
    seen = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD")}
    seen |= {
        "host": socket.gethostname(),
        "folder": os.getcwd(),
        "address of node1": socket.gethostbyname("node1"),
        "address of localhost": socket.gethostbyname("localhost"),
    }
    for name, folder in (("interfaces", "/sys/class/net"), ("groups", "/sys/fs/cgroup")):
        seen[name] = sorted(os.listdir(folder))
    print(json.dumps(seen))


def rates(size_bytes):
    """Sends `size_bytes` from rank 0 to each other rank and back, one transfer after another."""
    for other in range(1, SIZE):
        for sender, receiver in ((0, other), (other, 0)):
            if receiver == RANK:
                _receive(
                    int(size_bytes), f"{sender}>{receiver}", PORT + 2 * other + (receiver == 0)
                )
            elif sender == RANK:
                with _connect(receiver, PORT + 2 * other + (receiver == 0)) as peer:
                    peer.sendall(bytes(int(size_bytes)))
                    peer.shutdown(socket.SHUT_WR)
                    peer.recv(1)


def connections(count, size_bytes):
    """Sends `size_bytes` from rank 0 to rank 1 over each of several connections, all at once."""
    ports = range(PORT, PORT + int(count))
    act = _receive if RANK == 1 else _send
    with ThreadPoolExecutor(len(ports)) as threads:
        list(threads.map(lambda port: act(int(size_bytes), f"connection {port}", port), ports))


def _send(size_bytes, name, port):
    with _connect(1, port) as peer:
        peer.sendall(bytes(size_bytes))
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)


def _receive(size_bytes, pair, port):
    """Prints the link rate in b/s over all bytes, and over the fastest quarter of the bytes."""
    with socket.create_server(("", port)) as server:
        peer, _ = server.accept()
        with peer:
            arrived = []  # (seconds, bytes so far)
            total = 0
            while chunk := peer.recv(65536):
                total += len(chunk)
                arrived.append((time.perf_counter(), total))
    assert total == size_bytes
    quarters = []
    begin = 0
    for end in range(len(arrived)):
        while arrived[end][1] - arrived[begin + 1][1] >= size_bytes / 4:
            begin += 1
        if arrived[end][1] - arrived[begin][1] >= size_bytes / 4:
            quarters.append(_rate(arrived[begin], arrived[end]))
    print(f"rate {pair} {_rate(arrived[0], arrived[-1]):.0f} {max(quarters):.0f}", flush=True)


def _rate(begin, end):
    return 8 * (end[1] - begin[1]) * 1514 / 1448 / (end[0] - begin[0])


def _connect(rank, port):
    node = rank // int(os.environ["HOROVOD_LOCAL_SIZE"])
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((f"node{node}", port), timeout=60)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def round_trips():
    if RANK == 1:
        with socket.create_server(("", PORT)) as server:
            peer, _ = server.accept()
            while byte := peer.recv(1):
                peer.send(byte)
        return
    times = []
    with _connect(1, PORT) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(50):
            begin = time.perf_counter()
            peer.send(b"x")
            peer.recv(1)
            times.append(time.perf_counter() - begin)
    print(f"round trips: median {1e3 * statistics.median(times):.3f} ms")


def lost(count=500):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        if RANK == 0:
            time.sleep(1)
            for _ in range(count):
                own.sendto(b"x", ("node1", PORT))
                time.sleep(0.001)
            return
        own.bind(("", PORT))
        own.settimeout(5)
        came = 0
        try:
            while own.recv(1):
                came += 1
                own.settimeout(2)
        except TimeoutError:
            print(f"part lost {1 - came / count:.3f}")


def flood(count=100_000):
    """Sends more packets from rank 0 than the process that delays packets can read."""
    if RANK == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            for _ in range(count):
                own.sendto(bytes(100), ("10.99.0.2", PORT))


def fail():
    if RANK == 1:
        print("last words of rank 1")
        sys.exit(3)
    signal.signal(
        signal.SIGTERM, lambda *_: (print("rank 0 was asked to end", flush=True), sys.exit(0))
    )
    time.sleep(900)


def tick():
    """Prints how long the rank was stopped, and when it loses its link to the switch."""
    last = time.monotonic()
    while True:
        time.sleep(0.05)
        now = time.monotonic()
        if now - last > 0.5:
            print(f"gap {now - last:.2f}", flush=True)
        with open("/sys/class/net/eth0/carrier") as stream:
            if stream.read().strip() == "0":
                print("lost the switch", flush=True)
                time.sleep(60)
        last = now


def wait():
    print("ready", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
