"""Predicts steps, memory and time of a run on a given cluster."""

import math
from typing import NamedTuple

import tfposeidon as tp
from tfposeidon import policies
from tfposeidon.autotune.search import choose_plan, predict
from tfposeidon.autotune.simulation import Timeline
from tfposeidon.communication.topology import Topology
from tfposeidon.exchange.plan import Plan
from tfposeidon.gradients import describe
from tfposeidon.text import readable_size, table

SINGLE = {96: 4400, 128: 3010, 224: 1240, 288: 710}
"""Images per second of one V100, by resolution (CommLib, table 4)."""
TOGETHER = {96: 366_208, 128: 269_696, 224: 131_712, 288: 72_960}
"""Images per second of 128 V100 on 16 nodes with 25 Gb/s (table 4)."""
FORWARD = 1 / 3
"""Share of a step's computation before its first gradient."""
IMAGES = {"train": 1_281_167, "test": 50_000}
"""Numbers of images in ImageNet."""
TIMES = ("pixels", "epochs", "steps", "compute", "step", "efficiency", "images/s")
TIMES += ("in the paper", "seconds", "in the paper", "cache per node")
PLANS = ("pixels", "buckets", "within the node", "between nodes", "schemes")


def show(recipe, model, nodes, per_node, network, kept_side, with_variables=False):
    """Prints the time and the plan of each phase, and the memory of a rank.

    Args:
      recipe: The `Recipe`.
      model: The model, for its variables.
      nodes: Number of nodes.
      per_node: Ranks per node.
      network: Bandwidth between nodes, such as "25gbit".
      kept_side: Function from the side of a crop to the side of the cached images.
      with_variables: True to print complete plans, with a line for each variable.
    """
    topology = Topology.regular(0, nodes * per_node, per_node)
    links = tp.NetworkProfile.of(network, ranks_per_node=per_node, device="v100")
    steps = [_step(phase, model, topology, links) for phase in recipe.phases]
    rows = [
        _times(phase, step, topology, kept_side)
        for phase, step in zip(recipe.phases, steps, strict=True)
    ]
    print("\n".join(table([TIMES, *rows])))
    print("\nplans, and the bytes that rank 0 sends in each step:")
    rows = [_plan(phase, step.plan) for phase, step in zip(recipe.phases, steps, strict=True)]
    print("\n".join(table([PLANS, *rows])))
    total_s = sum(
        _count(phase, topology) * step.step_s
        for phase, step in zip(recipe.phases, steps, strict=True)
    )
    ranks = f"{topology.size} V100 with {network} between nodes"
    print(f"\ntraining: {total_s:.0f} s on {ranks}, without evaluation, tracing and reading")
    print(_memory(model, [step.plan for step in steps]))
    print("cached images: all resolutions together, split over nodes if memory is insufficient")
    if with_variables:
        for plan in {step.plan.digest: step.plan for step in steps}.values():
            print(f"\n{plan}")


class _Step(NamedTuple):
    """Plan of a phase, and the predicted seconds of a step and of its computation."""

    plan: Plan
    step_s: float
    compute_s: float


def _step(phase, model, topology, links):
    compute_s = phase.batch / SINGLE[phase.size]
    descriptions = [describe(variable) for variable in model.trainable_variables]
    timeline = Timeline.even(
        variables=len(descriptions), first_s=FORWARD * compute_s, compute_s=compute_s
    )
    policy = policies.parse(phase.scheme)
    plan = choose_plan(descriptions, policy, topology, links, timeline=timeline)
    return _Step(plan, predict(plan, links, timeline), compute_s)


def _count(phase, topology):
    """Returns the number of steps in a phase."""
    return phase.epochs * -(-IMAGES["train"] // (phase.batch * topology.size))


def _times(phase, step, topology, kept_side):
    """Returns the row of a phase in the table with the columns `TIMES`."""
    cached = sum(IMAGES.values()) * (3 * kept_side(phase.size) ** 2 + 4)
    is_paper = (len(topology.nodes), topology.size) == (16, 128)
    paper = TOGETHER.get(phase.size) if is_paper else None
    count = _count(phase, topology)
    return (
        str(phase.size),
        str(phase.epochs),
        str(count),
        f"{1e3 * step.compute_s:.1f} ms",
        f"{1e3 * step.step_s:.1f} ms",
        f"{step.compute_s / step.step_s:.0%}",
        f"{phase.batch * topology.size / step.step_s:,.0f}",
        f"{paper:,}" if paper else "",
        f"{count * step.step_s:.0f}",
        f"{phase.epochs * IMAGES['train'] / paper:.0f}" if paper else "",
        readable_size(cached),
    )


def _plan(phase, plan):
    """Returns the row of a phase in the table with the columns `PLANS`."""
    # List each scheme once, in the order of buckets.
    schemes = dict.fromkeys(str(bucket.scheme) for bucket in plan.buckets)
    return (
        str(phase.size),
        str(len(plan.buckets)),
        readable_size(plan.cost.node_bytes),
        readable_size(plan.cost.cross_bytes),
        ", ".join(schemes),
    )


def _memory(model, plans):
    """Describes a rank's memory for the model, its optimizer and its schemes in one line."""
    weights, gradients = (
        sum(4 * math.prod(variable.shape) for variable in variables)
        for variables in (model.variables, model.trainable_variables)
    )
    return (
        f"weights, gradients and velocity: {readable_size(weights + 2 * gradients)} per rank; "
        f"residuals of top-k: {readable_size(max(map(_state_bytes, plans)))}; "
        "activations are not included"
    )


def _state_bytes(plan):
    """Returns the size in bytes of the state of a plan's schemes on one rank."""
    slots = [slot for bucket in plan.buckets for slot in bucket.slots(plan.topology)]
    return sum(4 * math.prod(slot.shape) for slot in slots)
