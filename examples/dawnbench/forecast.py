"""What a run would take on a cluster that one has or has not: steps, memory and predicted time."""

import math

import tfposeidon as tp
from tfposeidon import policies
from tfposeidon.communication.topology import Topology
from tfposeidon.gradients.description import describe
from tfposeidon.planning.search import choose_plan, predict
from tfposeidon.planning.simulation import Timeline
from tfposeidon.text import table
from tfposeidon.units import readable_size

SINGLE = {96: 4400, 128: 3010, 224: 1240, 288: 710}
"""Images per second of one V100 by the resolution (CommLib, table 4)."""
TOGETHER = {96: 366_208, 128: 269_696, 224: 131_712, 288: 72_960}
"""The same of 128 of them, 16 nodes with 25 Gb/s (table 4)."""
FORWARD = 1 / 3
"""Share of a step's computation that comes before its first gradient."""
IMAGES = {"train": 1_281_167, "test": 50_000}
"""Images of ImageNet."""


def show(recipe, model, nodes, per_node, network, kept_side):
    """Prints a line for each phase, and the plans.

    Args:
      recipe: The `Recipe`.
      model: The model, for its variables.
      nodes: Number of nodes.
      per_node: Ranks of each.
      network: Rate between nodes, such as "25gbit".
      kept_side: Function from the side of a crop to that of the images in the cache.
    """
    topology = Topology.regular(0, nodes * per_node, per_node)
    links = tp.Links.of(network, ranks_per_node=per_node, device="v100")
    header = ("pixels", "epochs", "steps", "computing", "step", "efficiency", "images/s")
    rows = [(*header, "of the paper", "seconds", "of the paper", "cache per node")]
    total_s = 0.0
    for phase in recipe.phases:
        step_s, compute_s = _step(phase, model, topology, links)
        batch = phase.batch * topology.size
        steps = phase.epochs * -(-IMAGES["train"] // batch)
        total_s += steps * step_s
        cached = sum(IMAGES.values()) * (3 * kept_side(phase.size) ** 2 + 4)
        paper = TOGETHER.get(phase.size) if (nodes, per_node) == (16, 8) else None
        paper_s = phase.epochs * IMAGES["train"] / paper if paper else None
        rows.append(
            (
                str(phase.size),
                str(phase.epochs),
                str(steps),
                f"{1e3 * compute_s:.1f} ms",
                f"{1e3 * step_s:.1f} ms",
                f"{compute_s / step_s:.0%}",
                f"{batch / step_s:,.0f}",
                f"{paper:,}" if paper else "",
                f"{steps * step_s:.0f}",
                f"{paper_s:.0f}" if paper_s else "",
                readable_size(cached),
            )
        )
    print("\n".join(table(rows)))
    weights = sum(4 * math.prod(variable.shape) for variable in model.variables)
    ranks = f"{topology.size} V100 with {network} between nodes"
    print(f"\ntraining: {total_s:.0f} s on {ranks}, without evaluation, tracing and reading")
    print(
        f"weights, gradients and velocity: {readable_size(3 * weights)} per rank, and "
        f"{readable_size(weights)} for what top-k keeps; activations come on top"
    )
    print("images in the cache: two resolutions at a time, split over nodes where memory is short")


def _step(phase, model, topology, links):
    """Returns the predicted seconds of a step, and those of its computation."""
    compute_s = phase.batch / SINGLE[phase.size]
    descriptions = [describe(variable) for variable in model.trainable_variables]
    timeline = Timeline.even(
        variables=len(descriptions), first_s=FORWARD * compute_s, compute_s=compute_s
    )
    policy = policies.parse(phase.scheme)
    plan = choose_plan(descriptions, policy, topology, links, timeline=timeline)
    return predict(plan, links, timeline).step_s, compute_s
