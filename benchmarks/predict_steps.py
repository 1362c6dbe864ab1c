"""Predicts steps of emulated models, for `benchmarks.predict --steps`."""

import dataclasses
import json
import statistics

from benchmarks import architectures, grid, harness
from benchmarks.exchanges import one_server_each, scheme_named
from tfposeidon import policies, schemes
from tfposeidon.autotune import search
from tfposeidon.autotune.simulation import Timeline
from tfposeidon.exchange.plan import DEFAULT_BUCKET_BYTES, make_plan
from tfposeidon.factors.pairs import FactorShape
from tfposeidon.gradients import Description

STEPS = ("scaling", "sparse_scaling", "poseidon", "overview", "auto")
SHOWS = 1.15
"""Smallest ratio of step to computation for exposed communication."""

SYSTEMS = {
    "hybcomm": "hybcomm",
    "factors": [("dense[0-9]+/kernel", "factors"), (".*", "allreduce")],
}
HOROVOD = {
    "horovod": "allreduce",
    "horovod-fp16": schemes.AllReduce(wire_dtype="float16"),
}


def descriptions_of(model):
    """Returns the gradients of an emulated model, and the layer of each."""
    found = []
    for layer in model.layers:
        factors = None
        if layer.rows:
            rows = model.batch * layer.rows
            factors = FactorShape(rows, *layer.kernel, dtype="float32")
        found.append((Description(f"{layer.name}/kernel", layer.kernel, "float32", factors), layer))
        found += [
            (Description(f"{layer.name}/vector{index}", (length,), "float32"), layer)
            for index, length in enumerate(layer.vectors)
        ]
    return found


def timeline_of(model, dilation, links):
    """Returns when each gradient of an emulated model is ready, and when the computation ends.

    The accelerator is emulated, but the CPU computes the real products of dense layers.
    """
    times = model.times()
    now_s = dilation * sum(forward_s for forward_s, _ in times)
    cpu_s, ready = 0.0, {}
    for layer, (_, backward_s) in reversed(list(zip(model.layers, times, strict=True))):
        now_s += dilation * backward_s
        ready[layer.name] = now_s
        if layer.rows:
            operations = 2 * model.batch * layer.rows * layer.kernel[0] * layer.kernel[1]
            cpu_s = max(cpu_s, now_s) + operations * links.rates.operation_s
            ready[layer.name] = cpu_s
    return tuple(ready[layer.name] for _, layer in descriptions_of(model)), max(now_s, cpu_s)


def model_of(task):
    """Returns the emulated model of a job."""
    model = architectures.model(task["model"])
    return model.shrunk(task["shrink"]) if task["shrink"] != 1 else model


def predicted_step(cell, system, links):
    """Returns the predicted seconds of a measured step."""
    task = cell["task"]
    model = model_of(task)
    ready_s, compute_s = timeline_of(model, task["dilation"] * task.get("uneven", 1.0), links)
    name = system.removesuffix("-late")
    if name != system:
        ready_s = (compute_s,) * len(ready_s)
    descriptions = [description for description, _ in descriptions_of(model)]
    topology = grid.topology_of(cell["layout"])
    scheme, bucket_bytes = SYSTEMS.get(name), DEFAULT_BUCKET_BYTES / task["shrink"] ** 2
    if name == "ps-adam":
        scheme = one_server_each({d.path: d.length for d in descriptions}, topology.size)
    if name in HOROVOD:
        # Horovod is called once per gradient, and fuses these calls.
        scheme, bucket_bytes = HOROVOD[name], 0
    plan = make_plan(
        descriptions,
        policies.parse(scheme or scheme_named(name)),
        topology,
        round(bucket_bytes),
    )
    timeline = Timeline(ready_s=ready_s, compute_s=compute_s)
    return search.predict(plan, links, timeline)


def links_of(rows, cell):
    """Returns a job's network profile from the grid, or `None` if the grid lacks its layout."""
    bits_per_s = cell["rate_bits_per_s"]
    links = grid.links_at(rows, cell["layout"], bits_per_s)
    if links is None or "flow_gbit" not in cell:
        return links
    flow_bytes_per_s = links.across.bytes_per_s * cell["flow_gbit"] / cell["gbit"]
    across = dataclasses.replace(links.across, flow_bytes_per_s=flow_bytes_per_s)
    return dataclasses.replace(links, across=across)


def compared(rows):
    """Yields each measured step with its prediction, in rows like those of `predict.compared`."""
    for file in STEPS:
        path = harness.RESULTS / f"{file}.json"
        for cell in json.loads(path.read_text()).values() if path.exists() else ():
            if cell["worker"] != "keras_fit":
                continue
            links = links_of(rows, cell)
            if links is None:
                continue
            task = cell["task"]
            _, compute_s = timeline_of(
                model_of(task), task["dilation"] * task.get("uneven", 1.0), links
            )
            for system, found in cell["systems"].items():
                if system == "alone" or "step_s" not in found:
                    continue
                # Prefer the prediction of `auto` itself, from the network profile that it measured.
                step_s = found.get("predicted_s") or predicted_step(cell, system, links)
                measured_s = statistics.median(found["step_s"])
                yield {
                    "file": file,
                    "layout": cell["layout"],
                    "rate": f"{cell['gbit']:g} Gb/s",
                    "system": system,
                    "size": cell["model"],
                    "measured_s": measured_s,
                    "predicted_s": step_s,
                    "shows": measured_s > SHOWS * compute_s,
                }
