"""Stages for the network profile and `auto`, for `check`, and for Horovod over NCCL."""

import re
import subprocess
import sys
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp
from benchmarks.gpu_stages.device import at_most, device, gpus, median_ms, off
from benchmarks.gpu_stages.training import LOSS, same_everywhere


def links(checks):
    """Compares `auto`, with a measured network profile, with fixed schemes."""
    checks("auto", _auto)


def _auto(say):
    draw = np.random.default_rng(tp.rank())
    x, y = draw.normal(size=(512, 512)).astype("float32"), draw.integers(0, 10, 512)
    dense = keras.layers.Dense
    for scheme in (
        "auto",
        "allreduce",
        tp.schemes.AllToAll(wire_dtype="float16"),
        "hybcomm",
        "hitopk",
    ):
        keras.utils.set_random_seed(3)
        layers = [dense(1024, activation="relu") for _ in range(4)]
        model = keras.Sequential([keras.Input((512,)), *layers, dense(10)])
        optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(1e-3), scheme=scheme)
        model.compile(optimizer, LOSS)
        fit = {"batch_size": 32, "verbose": 0}
        model.fit(x, y, **fit)
        ms = median_ms(lambda model=model, fit=fit: model.fit(x, y, **fit), 3, 0) / 16
        same_everywhere(model.get_weights())
        say(f"{scheme} {ms:.1f} ms per step")
        if scheme == "auto":
            lines = str(optimizer.plan).splitlines()
            print(*lines, sep="\n", flush=True)
            say(" / ".join(line for line in lines if "link" in line))


def check(checks):
    """Runs `python -m tfposeidon check` on one and two ranks; NCCL refuses two ranks on one GPU."""
    for size in (2,) if checks.small else (1, 2):
        checks(f"on_{size}", _check, size)


def _check(say, size):
    beside = Path(sys.executable).with_name("horovodrun")
    program = beside if beside.exists() else "horovodrun"
    launcher = [program, "--gloo", "-np", str(size)] if size > 1 else []
    command = [*launcher, sys.executable, "-m", "tfposeidon", "check"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    print(done.stdout, flush=True)
    lines = [re.sub(r"^\[.*?>: ?", "", line).strip() for line in done.stdout.splitlines()]
    shown = r"^(tensorflow|horovod with|GPUs|NVIDIA|CUDA|cuDNN|NCCL|native|tfposeidon check:|PROB)"
    say(f"exit {done.returncode}", *(f"/ {line}" for line in lines if re.match(shown, line)))
    expected = "averages are correct"
    if len(gpus()) >= size and not hvd.nccl_built():
        expected = "Horovod must be built with NCCL"
    elif 0 < len(gpus()) < size and hvd.nccl_built():
        expected = "NCCL requires one GPU per rank"
    assert expected in done.stdout, done.stdout[-500:]
    assert (done.returncode == 0) == (expected == "averages are correct"), done.returncode


def nccl(checks):
    """Checks Horovod's collectives on GPU tensors, if it was built with NCCL."""
    checks("dtypes", _dtypes)
    checks("rate", _rate)


def _dtypes(say):
    say(f"NCCL {hvd.nccl_built()}, {tp.size()} rank(s)")
    for dtype in ("float16", "float32", "float64", "int32", "int64", "uint8", "uint16"):
        with tf.device(device()):
            own = tf.cast(tf.range(1000) % 100 + tp.rank(), dtype)
        found = tf.function(tp.all_gather, autograph=False)(own)
        expected = np.concatenate([np.arange(1000) % 100 + r for r in range(tp.size())])
        assert off(found, expected) == 0, dtype
        if dtype != "uint16":
            summed = tf.function(lambda v: tp.all_reduce(v, op="sum"), autograph=False)(own)
            at_most(say, 1e-6, off(summed, expected.reshape(tp.size(), -1).sum(0)), dtype)


def _rate(say):
    for n in (2**20, 2**24):
        with tf.device(device()):
            v = tf.random.normal([n])
        call = tf.function(lambda t: tp.all_reduce(t, op="sum"), autograph=False)
        say(f"{4 * n // 2**20} MiB: {median_ms(lambda v=v, call=call: call(v), 5):.2f} ms")
    say("on", "the GPU" if gpus() else "the CPU")
