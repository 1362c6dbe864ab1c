"""Tests parts of the lab that need no namespaces: packet delays, and refused options."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfposeidon.lab import command, demo
from tfposeidon.lab.delay_line import DelayLine


def test_packet_delays_are_bounded_and_preserve_order():
    line = DelayLine(delay_s=0.01, jitter_s=0.004, loss=0.0)
    for number in range(1000):
        line.take(bytes([number % 256]), target=number % 2, now_s=number * 1e-3)
    assert line.due(0.0059) == []
    came, now_s = [], 0.0
    while (wait_s := line.until_next(now_s)) is not None:
        now_s += wait_s
        came += [(now_s, target, frame) for target, frame in line.due(now_s)]
    for target in (0, 1):
        frames = [(at_s, frame[0]) for at_s, to, frame in came if to == target]
        assert [frame for _, frame in frames] == [number % 256 for number in range(target, 1000, 2)]
        late = [
            at_s - number * 1e-3
            for (at_s, _), number in zip(frames, range(target, 1000, 2), strict=True)
        ]
        assert 0.006 <= min(late) < 0.008
        assert 0.013 < max(late) <= 0.0141


def test_the_requested_share_of_packets_is_lost():
    line = DelayLine(delay_s=0.0, jitter_s=0.0, loss=0.1)
    for _ in range(10_000):
        line.take(b"", target=0, now_s=0.0)
    assert 800 < 10_000 - len(line.due(1.0)) < 1200


REFUSED = {
    "--nodes 2 --": "A command is required. Received: [",
    "--nodes 0 -- true": "`--nodes` must be in 1..250. Received: 0",
    "--nodes 2 --per-node 0 -- true": "`--per-node` must be an integer >= 1. Received",
    "--nodes 2 --inter 200 -- true": "A rate must be between 8kbit and 1tbit. Received: '200'",
    "--nodes 2 --inter fast -- true": "A rate must be a number with a unit, such as 200mbit",
    "--nodes 2 --rtt 1 -- true": "A duration must be a number with a unit",
    "--nodes 2 --rtt 1ms --jitter 1ms -- true": "`--jitter` must not exceed half of `--rtt`",
    "--nodes 2 --loss 100% -- true": "`--loss` must be a number in [0, 1). Received: --loss=1.0",
    "--nodes 2 --kill 1 -- true": (
        "`--kill` must have the form RANK@SECONDS, such as 1@30. Received: '1'"
    ),
    "--nodes 2 --kill 2@1 -- true": "`--kill` must name a rank in 0..1. Received: rank 2",
    "--nodes 2 --stop 1@1 -- true": "RANK@SECONDS+SECONDS",
    "--nodes 2 --cut 2@1 -- true": "`--cut` must name a node in 0..1. Received: node 2",
    "--nodes 2 --slow 2=1mbit -- true": "`--slow` must name a node in 0..1. Received: node 2",
    "--nodes 2 --slow 1 -- true": "`--slow` must have the form NODE=RATE",
    "--nodes 2 -- no-such-program": (
        "The command must be an executable file, or on PATH. Received: 'no-such-program'"
    ),
    "--nodes 200 --per-node 100 -- true": (
        "All ranks must fit into memory. Received: 20000 ranks of 400.00 MB"
    ),
    "--nodes 2 --report /no/such/folder/r.json -- true": (
        "`--report` must name a file in a writable directory"
    ),
    "--nodes 2 --report /tmp -- true": (
        "`--report` must name a file in a writable directory. Received: /tmp"
    ),
    "--nodes 2 --inter 2000000tbit -- true": "A rate must be between 8kbit and 1tbit",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_input_is_refused_before_anything_starts(arguments, capsys, monkeypatch):
    from tfposeidon import __main__

    monkeypatch.setattr(command, "run_inside", lambda *_: pytest.fail("something was started"))
    monkeypatch.setattr(sys, "argv", ["tfposeidon", "lab", *arguments.split()])
    try:
        status = __main__.main()
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert REFUSED[arguments] in capsys.readouterr().err


def test_started_modules_ignore_the_current_folder_if_the_lab_does(monkeypatch):
    """Sources in the current folder would hide the installed package from the ranks."""
    for is_safe, options in ((False, []), (True, ["-P"])):
        flags = SimpleNamespace(safe_path=is_safe)
        # Replace `sys` only in this module, because jobs on other threads read its flags meanwhile.
        own = SimpleNamespace(executable=sys.executable, flags=flags)
        monkeypatch.setattr(command, "sys", own)
        assert command.python("module") == [sys.executable, *options, "-m", "module"]


def test_the_demo_has_time_for_its_steps_and_no_gpus(monkeypatch):
    """100 steps take 1,060 s. With a GPU, NCCL would refuse several ranks on it."""
    asked = {}

    def run(command, **keywords):
        asked.update(keywords)
        path = command[command.index("tfposeidon.lab.demo") + 1]
        Path(path).write_text(json.dumps({"allreduce": {"step_s": 1.0, "sent_bytes": 1.0}}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert list(demo.measure(steps=100)) == ["allreduce"]
    assert asked["timeout"] > 1060
    assert asked["env"]["CUDA_VISIBLE_DEVICES"] == ""
