"""Tests the lab with real namespaces and links, by jobs that need no TensorFlow."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest

from tests.launch import LIMIT_S, ROOT, ahead, descendants, finish, lab, lab_command, start

PROBES = ROOT / "tests" / "jobs" / "probes.py"
TRIES = 5
"""Number of attempts at measurements that a busy machine may slow down."""


def probe(options, *arguments, **keywords):
    return lab(options, sys.executable, PROBES, *arguments, **keywords)


def report(path):
    return json.loads(path.read_text())


def test_ranks_receive_the_environment_of_horovodrun():
    done = probe("--nodes 2 --per-node 2", "environment")
    assert done.returncode == 0, done.stdout
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("[") and "{" in line:
            found[int(line[1])] = json.loads(line[4:])
    expected = [
        # Each rank has a local rank, a cross rank and a host.
        (0, 0, "node0"),
        (1, 0, "node0"),
        (0, 1, "node1"),
        (1, 1, "node1"),
    ]
    for rank, (local_rank, cross_rank, host) in enumerate(expected):
        own = found[rank]
        assert (own["HOROVOD_RANK"], own["HOROVOD_SIZE"]) == (str(rank), "4")
        assert (own["HOROVOD_LOCAL_RANK"], own["HOROVOD_LOCAL_SIZE"]) == (str(local_rank), "2")
        assert (own["HOROVOD_CROSS_RANK"], own["HOROVOD_CROSS_SIZE"]) == (str(cross_rank), "2")
        assert own["HOROVOD_HOSTNAME"] == own["host"] == host
        assert own["folder"] == str(ROOT)
        assert own["address of node1"] == "10.99.0.2"
        assert own["interfaces"] == ["eth0", "lo"]
        # The control groups are those of this machine, so that limits of containers apply.
        assert own["groups"] == sorted(os.listdir("/sys/fs/cgroup"))


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root, to replace /etc/hosts")
def test_node_names_override_the_hosts_file(tmp_path):
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("requires the right to mount")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost node1\n")
    replace = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"']
    seen = lab_command("--nodes 2", sys.executable, str(PROBES), "environment")
    done = finish(start([*replace, str(hosts), *seen]))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count('"address of node1": "10.99.0.2"') == 2
    assert done.stdout.count('"address of localhost": "127.0.0.1"') == 2


def test_packets_beyond_the_capacity_of_the_lab_count_as_dropped(tmp_path):
    path = tmp_path / "report.json"
    assert probe(f"--nodes 2 --loss 1% --report {path}", "flood").returncode == 0
    assert report(path)["traffic"][0]["dropped_packets"] > 0


def test_nohup_protects_a_lab():
    process = start(["nohup", *lab_command("--nodes 1", sys.executable, str(PROBES), "wait")])
    for line in process.stdout:
        if "ready" in line:
            break
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    # The exit status names the first signal that was not ignored.
    assert finish(process).returncode == 128 + signal.SIGTERM


def test_links_have_the_requested_rate(tmp_path):
    """Both directions have this rate, one node is slower, and bursts are small."""
    path = tmp_path / "report.json"
    _check_rates(
        f"--nodes 3 --inter 100mbit --slow 2=20mbit --report {path}",
        {"0>1": 1e8, "1>0": 1e8, "0>2": 2e7, "2>0": 2e7},
    )
    links = report(path)["traffic"]
    assert [link["rate_bits_per_s"] for link in links] == [1e8, 1e8, 2e7]
    for link, payload in zip(links, (16e6, 8e6, 8e6), strict=True):
        assert payload < link["sent_bytes"] < 1.1 * payload
        assert payload < link["received_bytes"] < 1.1 * payload
        assert link["sent_packets"] > payload / 1448
        share = 8 * link["sent_bytes"] / link["rate_bits_per_s"] / report(path)["wall_s"]
        assert link["sent_share"] == pytest.approx(share)


def _check_rates(options, expected):
    """Checks that each link carries its rate to within 5 %.

    All bytes together must not be faster, and the fastest quarter of the bytes must not be slower.
    Other bytes may be slower, because a link does not catch up after a pause of the machine that is
    longer than its burst.
    """
    best = dict.fromkeys(expected, 0.0)
    for _ in range(TRIES):
        done = probe(options, "rates", 8_000_000)
        assert done.returncode == 0, done.stdout
        lines = [line.split()[2:] for line in done.stdout.splitlines() if " rate " in line]
        rates = {pair: (float(whole), float(quarter)) for pair, whole, quarter in lines}
        assert all(rates[pair][0] < 1.05 * rate for pair, rate in expected.items()), done.stdout
        best = {pair: max(rate, rates[pair][1]) for pair, rate in best.items()}
        if all(best[pair] > 0.95 * rate for pair, rate in expected.items()):
            return
    raise AssertionError(f"{best} in {TRIES} tries:\n{done.stdout}")


def test_links_have_the_requested_delay_jitter_and_loss():
    done = probe("--nodes 2 --rtt 20ms --jitter 2ms", "round_trips")
    assert 16 < _median_ms(done) < 26, done.stdout
    done = probe("--nodes 2 --loss 20%", "lost")
    lost = float(done.stdout.split(" lost ")[1].split()[0])
    assert 0.10 < lost < 0.30, done.stdout


def _median_ms(done):
    return float(done.stdout.split(" median ")[1].split()[0])


def test_links_within_a_node_have_the_requested_rate():
    _check_rates("--nodes 1 --per-node 2 --intra 100mbit", {"0>1": 1e8})


@pytest.mark.parametrize(("connections", "rate"), [(1, 5e7), (2, 4e7)])
def test_each_connection_has_its_own_limit(connections, rate):
    """Two connections also share the link, whose rate is less than twice the limit of one."""
    for _ in range(TRIES):
        done = probe(
            "--nodes 2 --inter 80mbit --flow 50mbit", "connections", connections, 4_000_000
        )
        assert done.returncode == 0, done.stdout
        # Both lines may arrive as one, because the ranks' threads write at the same time.
        found = re.findall(r"connection \d+ (\d+) (\d+)", done.stdout)
        assert len(found) == connections
        assert all(float(whole) < 1.05 * 5e7 for whole, _ in found), done.stdout
        if all(float(quarter) == pytest.approx(rate, rel=0.1) for _, quarter in found):
            return
    raise AssertionError(done.stdout)


def test_the_first_failed_rank_sets_the_exit_status_and_ends_the_others():
    done = probe("--nodes 2 --show first", "fail")
    assert done.returncode == 3
    assert "[1] last words of rank 1" in done.stdout
    assert "tfposeidon lab: rank 1 ended with exit status 3" in done.stdout
    assert "[0] rank 0 was asked to end" in done.stdout


def test_faults_occur_at_the_requested_time(tmp_path):
    path = tmp_path / "report.json"
    done = probe(f"--nodes 3 --stop 0@1+2 --cut 1@1.5 --kill 2@5 --report {path}", "tick")
    assert done.returncode == 128 + signal.SIGKILL, done.stdout
    gaps = {
        line.split()[0]: float(line.split()[2])
        for line in done.stdout.splitlines()
        if " gap " in line
    }
    assert 1.8 < gaps["[0]"] < 2.6, done.stdout
    assert "[1] lost the switch" in done.stdout
    for text in (
        "stop rank 0 after 1 s",
        "continue rank 0 after 3 s",
        "cut node 1's link after 1.5 s",
    ):
        assert f"tfposeidon lab: {text}" in done.stdout
    assert report(path)["ranks"][2]["status"] == -signal.SIGKILL
    assert 4.5 < report(path)["ranks"][2]["wall_s"] < 6.5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_lab_leaves_no_processes_or_namespaces(number):
    """A second lab that runs at the same time is not affected."""
    other = probe("--nodes 2", "tick", background=True)
    process = probe("--nodes 2 --inter 10mbit", "wait", background=True)
    for line in process.stdout:
        if "ready" in line:
            break
    below = descendants(process.pid)
    namespaces = _network_namespaces(below) - _network_namespaces([os.getpid()])
    assert len(namespaces) == 3, "expected one for the switch and one for each node"
    assert len(below) > 5
    process.send_signal(number)
    process.wait(60)
    deadline = time.monotonic() + 60
    while (
        any(os.path.exists(f"/proc/{pid}") for pid in below if pid != process.pid)
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert not [pid for pid in below if pid != process.pid and os.path.exists(f"/proc/{pid}")]
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    process.stdout.close()
    other.send_signal(signal.SIGTERM)
    assert "tfposeidon lab: interrupted" in finish(other).stdout
    everybody = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    assert not namespaces & _network_namespaces(everybody)


def _network_namespaces(processes):
    found = set()
    for pid in processes:
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("wait_s", [0.0, 0.2, 0.5])
def test_a_signal_during_the_start_ends_the_lab(wait_s):
    process = lab("--nodes 2", "sleep", "60", background=True)
    time.sleep(wait_s)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    # Without a delay, the signal may arrive before the lab has set its handler.
    assert done.returncode in (128 + signal.SIGTERM, -signal.SIGTERM), done.stdout


def test_child_processes_of_a_rank_do_not_delay_the_job():
    # A lab that waits for the child process would exceed the time limit of the test.
    done = lab("--nodes 2 --show first", "sh", "-c", "sleep 900 & echo gone; exit 3")
    assert done.returncode == 3
    assert "[0] gone" in done.stdout


def test_a_job_with_closed_output_ends():
    process = lab("--nodes 2", "yes", background=True)
    assert process.stdout.readline().endswith("] y\n")
    process.stdout.close()
    assert process.wait(60) != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root, to change the user")
def test_without_root_the_lab_uses_a_user_namespace():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        _check_as_another_user(Path(folder))


OUR_PACKAGES = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
BECOME = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


def _check_as_another_user(tmp_path):
    script = tmp_path / "hello.sh"
    script.write_text("echo hello from $HOROVOD_HOSTNAME")
    shutil.copytree(ROOT / "tfposeidon", tmp_path / "tfposeidon")
    arguments = [
        "-m",
        "tfposeidon",
        "lab",
        "--nodes",
        "2",
        "--inter",
        "1mbit",
        "--",
        "sh",
        str(script),
    ]
    command = [*BECOME, _python_of_others(), *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, env=OUR_PACKAGES
    )
    assert done.returncode == 0, done.stderr
    assert "[1] hello from node1" in done.stdout


def _python_of_others():
    """Returns a Python that another user can run in a user namespace: this one or the system's.

    In a user namespace, root's home may be inaccessible to this user although it is accessible
    outside, because in some containers a process keeps its rights when it changes its user.
    """
    needed = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    for python in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")):
        tried = [*BECOME, "unshare", "--user", str(python), "-c", needed]
        if subprocess.run(tried, capture_output=True, env=OUR_PACKAGES).returncode == 0:
            return python
    pytest.skip("requires user namespaces, and a Python of this version that other users can run")


def test_missing_tools_are_named(tmp_path):
    for tool in ("hostname", "unshare", "nsenter", "setpriv", "mount", "true"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = lab("--nodes 2", "true", environment={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "the lab needs ip, tc. Run: apt-get install iproute2" in done.stdout


def test_missing_rights_are_named(tmp_path):
    """If the kernel refuses namespaces, the error lists every attempt with its cause."""
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2; exit 1\n")
    refusing.chmod(0o755)
    done = lab("--nodes 2", "true", environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 2
    assert "the lab needs network namespaces" in done.stdout
    assert "unshare failed: Operation not permitted" in done.stdout
    assert "Run the lab with sudo" in done.stdout


DEMO = [sys.executable, "-m", "tfposeidon", "demo", "--steps", "1"]


def demo():
    """Runs the demo, and returns the process, the path of the plot, and whether it exists."""
    with tempfile.TemporaryDirectory() as folder:
        plot = Path(folder) / "plots" / "demo.png"
        done = finish(start([*DEMO, "--plot", str(plot)]), timeout_s=400)
        return done, plot, plot.exists()


@ahead(demo)
def test_demo_compares_schemes(outcome):
    done, plot, is_plotted = outcome
    assert done.returncode == 0, done.stdout
    found = {}
    for label in (
        "Horovod's all-reduce",
        "tfposeidon auto, exact",
        "tfposeidon hybcomm, exact",
        "tfposeidon hitopk, top 1 %",
    ):
        (row,) = [line for line in done.stdout.splitlines() if line.startswith(label)]
        found[label] = row.removeprefix(label).replace("ms", "").replace("MB", "").split()
    (horovod_ms, horovod_mb, _), *ours = [list(map(float, row)) for row in found.values()]
    # In a ring of 2 x 2 ranks, each node's link carries 2 (P - 1) / P of 36 MB.
    assert 26.5 < horovod_mb < 28
    assert horovod_ms > 2000
    for label, (step_ms, sent_mb, times_faster) in zip(list(found)[1:], ours, strict=True):
        # The plan of `auto` depends on measured times, so its limit is looser.
        most = 1.05 if "auto" in label else 0.2
        assert sent_mb < most * horovod_mb, done.stdout
        assert times_faster == pytest.approx(horovod_ms / step_ms, abs=0.1)
    # The output states the plan and the reason.
    assert "chosen plan: " in done.stdout
    assert "predicted step: " in done.stdout
    assert "measured step: " in done.stdout
    assert f"wrote {plot}" in done.stdout or "Matplotlib is missing" in done.stdout
    assert is_plotted == (f"wrote {plot}" in done.stdout)
    assert "oneDNN" not in done.stdout


def test_the_demo_succeeds_if_the_lab_cannot_run(tmp_path):
    for tool in ("hostname", "unshare", "nsenter", "setpriv", "mount"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = finish(start(DEMO, environment={"PATH": str(tmp_path)}))
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert "the lab needs ip, tc. Run: apt-get install iproute2" in done.stdout
    assert done.stdout.startswith("tfposeidon demo: skipped, because the lab cannot run")
