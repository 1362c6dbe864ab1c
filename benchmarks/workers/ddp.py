"""Measures PyTorch's DistributedDataParallel over Gloo.

Models have the shapes, times and values of the emulated ones. Shapes are in PyTorch's order,
outputs first, because PowerSGD treats the first dimension as a matrix's rows.
"""

import gc
import math
import os
import traceback
from datetime import timedelta
from functools import partial

import numpy as np

from benchmarks.workers.task import Task
from tfposeidon.lab.architectures import Stream, gradient_values

try:
    import torch
except ImportError as error:
    raise ImportError(
        "The system `ddp` requires PyTorch. Run: pip install torch==2.13.0"
    ) from error

from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

# PyTorch's documentation calls ranks 1 to 4 typical; 4 is the most accurate.
POWERSGD = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}
# PowerSGD sends whole gradients before step `start_powerSGD_iter`, and then allocates its memory.
POWERSGD_WARM_UP = POWERSGD["start_powerSGD_iter"] + 1
SYSTEMS = ("ddp", "ddp-fp16", "ddp-powersgd")
# Timeout of one exchange: on a slow network, a bucket of 25 MB may wait for many others.
TIMEOUT = timedelta(minutes=10)
SPREAD_OVER = 8
# These are PyTorch's defaults: the first bucket is small, so that communication begins early, and
# all others have the last size.
BUCKETS_MIB = (1, 25)


def main():
    task = Task.from_argument()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("HOROVOD_GLOO_IFACE", "lo")
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{task.address(0)}",
        rank=task.rank,
        world_size=task.size,
        timeout=TIMEOUT,
    )
    for system in task.systems:
        try:
            measure(task, system)
        except Exception:  # noqa: BLE001
            task.note(system, {"error": traceback.format_exc()})
        # Reducers and their buckets are in reference cycles.
        gc.collect()
    distributed.destroy_process_group()


def measure(task, system):
    """Trains a new model with a system, and records times and bytes.

    Args:
      task: The job's `Task`.
      system: One of `SYSTEMS`.

    Raises:
      ValueError: If the system is unknown, or the warm-up too short for PowerSGD.
    """
    if system not in SYSTEMS:
        raise ValueError(f"`systems` must be among {', '.join(SYSTEMS)}. Received: {system!r}")
    if system == "ddp-powersgd" and task.warm_up < POWERSGD_WARM_UP:
        raise ValueError(
            f"`warm_up` must be at least {POWERSGD_WARM_UP} for PowerSGD. Received: {task.warm_up}"
        )
    torch_model = EmulatedModel(task.emulated(), task.dilation, seed=task.rank)
    # All ranks start with zeros, so weights need not be sent. Gradients are views of the buckets,
    # so they are not copied, and means do not overwrite the values from which they are made.
    options = {
        "init_sync": False,
        "gradient_as_bucket_view": True,
        "bucket_cap_mb_list": bucket_caps_mib(task),
    }
    parallel = torch.nn.parallel.DistributedDataParallel(torch_model, **options)
    if system == "ddp-fp16":
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif system == "ddp-powersgd":
        parallel.register_comm_hook(({}, PowerSGDState(None, **POWERSGD)), power_sgd)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    token = torch.zeros(1)

    def step():
        optimizer.zero_grad()
        parallel(token).sum().backward()
        optimizer.step()

    task.measure(system, step, everybody)


def bucket_caps_mib(task):
    """Returns bucket sizes in MiB; they shrink with the model."""
    return [mib / task.shrink**2 for mib in BUCKETS_MIB]


def power_sgd(groups_and_state, bucket):
    """Averages a bucket with PyTorch's hook, with a process group per bucket.

    A bucket has three exchanges, each started by the callback of the previous exchange, on one of
    the two threads of a group. With one group for all buckets, the order would differ between ranks
    (Gloo: "Received data size doesn't match expected size"), or both threads would wait for
    exchanges that no thread is free to run.

    Args:
      groups_and_state: Process group by bucket, and the state of PowerSGD.
      bucket: PyTorch's `GradBucket`.
    """
    groups, state = groups_and_state
    if bucket.index() not in groups:
        groups[bucket.index()] = distributed.new_group(timeout=TIMEOUT)
    state.process_group = groups[bucket.index()]
    return powerSGD_hook(state, bucket)


def everybody(seconds):
    """Returns the seconds of each rank, for `Task.measure`."""
    times = [torch.zeros((), dtype=torch.float64) for _ in range(distributed.get_world_size())]
    distributed.all_gather(times, torch.tensor(seconds, dtype=torch.float64))
    return [time.item() for time in times]


class EmulatedModel(torch.nn.Module):
    """Parameters and timing of a model, whose output is its input.

    Args:
      model: A `tfposeidon.lab.architectures.Model`.
      dilation: Factor on all times.
      seed: Seed of the gradients' values, different on each rank.
    """

    def __init__(self, model, dilation, seed):
        super().__init__()
        self.stream = Stream()
        pool = Pool(model.largest, seed)
        self.layers = torch.nn.ModuleList(
            EmulatedLayer(
                layer, model.batch, pool, partial(self.stream.run, dilation * forward_s), backward
            )
            for layer, (forward_s, backward_s) in zip(model.layers, model.times(), strict=True)
            for backward in [partial(self.stream.run, dilation * backward_s)]
        )

    def forward(self, token):
        """Waits for the time of the forward pass, and returns the token."""
        self.stream.begin()
        for layer in self.layers:
            token = layer(token)
        return token


class EmulatedLayer(torch.nn.Module):
    """Layer with real parameters that waits for its compute time, and then returns gradients."""

    def __init__(self, layer, batch, pool, wait_forward, wait_backward):
        super().__init__()
        self.wait_forward, self.wait_backward = wait_forward, wait_backward
        self._rows, self._pool = batch * layer.rows, pool
        shapes = [torch_shape(layer), *((length,) for length in layer.vectors)]
        self.own = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, token):
        """Waits for the time of the layer, and returns the token."""
        return Work.apply(token, self, *self.own)

    def gradients(self):
        """Returns the gradients of kernel and vectors.

        The gradient of a dense kernel is a real product; other gradients are values from the pool.
        """
        kernel, *vectors = [parameter.shape for parameter in self.own]
        if not self._rows:
            return [self._pool.values(shape) for shape in (kernel, *vectors)]
        outputs, inputs = (self._pool.values((self._rows, width)) for width in kernel)
        return [outputs.t() @ inputs, *map(self._pool.values, vectors)]


class Work(torch.autograd.Function):
    """Autograd function of a layer."""

    @staticmethod
    def forward(context, token, layer, *parameters):
        """Waits for the layer's forward pass."""
        context.layer = layer
        layer.wait_forward()
        return token.clone()

    @staticmethod
    def backward(context, upstream):
        """Waits for the layer's backward pass, and returns its gradients."""
        context.layer.wait_backward()
        return upstream, None, *context.layer.gradients()


class Pool:
    """Gradient values near zero with heavy tails, as in `tfposeidon.lab.architectures`.

    Args:
      length: Number of values of the largest tensor.
      seed: Seed of the values.
    """

    def __init__(self, length, seed):
        self._generator = np.random.default_rng(seed)
        length += max(1, length // SPREAD_OVER)
        self._values = torch.from_numpy(gradient_values(length, self._generator))

    def values(self, shape):
        """Returns a view of the given shape, which begins at another index each time."""
        length = math.prod(shape)
        begin = int(self._generator.integers(len(self._values) - length + 1))
        return self._values[begin : begin + length].view(*shape)


def torch_shape(layer):
    """Returns the kernel's shape in PyTorch: outputs before inputs, and windows last."""
    *window, inputs, outputs = layer.kernel
    return (outputs, inputs, *window)


if __name__ == "__main__":
    main()
