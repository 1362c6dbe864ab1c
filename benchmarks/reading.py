"""Measures reading of samples: from memory, from a slow source, and in training.

    python -m benchmarks.reading                          # short
    python -m benchmarks.reading --full                   # as in docs/results; 45 minutes
    python -m benchmarks.reading --full --parts jobs      # new jobs on a warm store; 13 minutes

The slow source is a folder that a preloaded library slows down (`native/slow_source.c`): every open
takes 4 ms, and all processes share 30 or 10 MB/s. The limit of reading from memory is one thread
that copies the same records of the same file in random order into one buffer
(`native/random_records.c`). Training is that of CommLib's Fig. 9. Ratios compare systems that
alternate in one run. An interrupted run resumes.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import figures, harness

# Rates of the slow source: at the first, a tuned reader keeps up with training; at the second, none
# does.
MB_S = [30, 10]
HELD = ("imports", "datacache", "tf.data cache")
COMMON = {"mb_s": MB_S, "nodes": {"layout": "2x2"}, "held": HELD, "ranks": [1, 2, 4]}
SHORT = COMMON | {
    "sizes": [96],
    "parts": ["warm", "jobs", "cold", "training"],
    "rounds": 3,
    "images": 600,
    "data_mb": 400,
}
FULL = COMMON | {
    "sizes": [96, 224],
    "parts": ["warm", "jobs", "cold", "memory", "training", "nodes"],
    "rounds": 9,
    "images": 6000,
    "data_mb": 1500,
}
SMALLEST = {
    "sizes": [96],
    "parts": ["warm", "memory", "training"],
    "rounds": 1,
    # Measure one system on one rank only, because each process imports TensorFlow.
    "held": ["datacache"],
    "ranks": [1],
    "images": 64,
    "data_mb": 10,
    "mb_s": [30],
    "nodes": {"layout": "2x1", "samples": 768, "rounds": 1},
}
BATCH = {96: 256, 224: 128}
OPEN_MS = 4
# New jobs read several times as much data, so that the start of an iterator has little weight.
JOBS_DATA = 4
# Each measuring process has its own folder, which it removes.
POOL = f"datacache-benchmark-{os.getpid()}"


def parse_arguments():
    parser = harness.argument_parser("reading", __doc__)
    parser.add_argument("--parts", nargs="*", choices=FULL["parts"], help="parts to measure")
    parser.add_argument(
        "--sizes", nargs="*", type=int, choices=[96, 224], help="sides of the images, in pixels"
    )
    parser.add_argument("--rounds", type=int, help="number of rounds of each system")
    parser.add_argument("--images", type=int, help="number of files of the slow source")
    parser.add_argument("--mb-s", nargs="*", type=int, help="rates of the slow source, in MB/s")
    parser.add_argument("--data-mb", type=int, help="megabytes of records in memory")
    return harness.parse(parser, SHORT, FULL, SMALLEST)


def planned(options):
    """Returns the jobs of all selected parts."""
    cells = []
    for size in options.sizes:
        samples = options.data_mb * 10**6 // (size * size * 3)
        of_size = {"size": size, "samples": samples}
        if "warm" in options.parts:
            cells.append(
                {"kind": "warm", **of_size, "batch": BATCH[size], "rounds": options.rounds}
            )
        if "jobs" in options.parts:
            longer = of_size | {"samples": JOBS_DATA * samples}
            cells.append({"kind": "jobs", **longer, "batch": BATCH[size], "rounds": options.rounds})
        if "memory" in options.parts and size == 96:
            cells += [
                {"kind": "memory", **of_size, "what": what, "ranks": ranks}
                for what in options.held
                for ranks in options.ranks
            ]
    if "cold" in options.parts:
        of_images = {"images": options.images, "batch": 64}
        cells += [{"kind": "decoding", **of_images, "rounds": min(3, options.rounds)}]
        cells += [{"kind": "cold", **of_images, "mb_s": mb_s} for mb_s in options.mb_s]
    if "training" in options.parts:
        task = {"images": options.images, "batch": 64, "step_s": 0.1, "epochs": 3}
        cells += [{"kind": "training", **task, "mb_s": mb_s} for mb_s in options.mb_s]
    if "nodes" in options.parts:
        cells.append({"kind": "nodes", **options.nodes, "rate": "1gbit"})
    return harness.keyed(cells)


def run(kind, **task):
    """Measures one job, in the lab or in a separate process."""
    return on_nodes(**task) if kind == "nodes" else on_one(kind, **task)


def on_nodes(layout, rate, samples=2560, rounds=3):
    """Measures a cache that is split over the nodes of the lab, and local data.

    Samples have 96 x 96 pixels, and steps exchange 25.6 MB.
    """
    task = {"pixels": 96, "samples": samples, "batch": 64, "width": 231, "warm_up": 5}
    task |= {"rounds": rounds, "systems": []}
    answer = harness.in_lab(harness.cluster(layout, rate), "partitioned", task)
    return answer | {"kind": "nodes", "layout": layout, "rate": rate}


def on_one(kind, **task):
    """Runs one worker in a separate process, with a slow source if it reads files."""
    with tempfile.TemporaryDirectory() as folder:
        environment = harness.environment()
        about = dict(task)
        if "images" in task:
            about["bytes"] = draw(Path(folder) / "source", task["images"])
            task["images"] = str(Path(folder) / "source")
            if "mb_s" in task:
                environment |= slow_source(folder, task.pop("mb_s"))
        if kind == "warm":
            task["copier"] = compiled(folder, "random_records.c", "-O2")
        task["folder"] = POOL
        command = [
            sys.executable,
            "-m",
            "benchmarks.workers.reading",
            json.dumps(task | {"kind": kind}),
        ]
        try:
            done = subprocess.run(
                command, cwd=harness.ROOT, env=environment, capture_output=True, text=True
            )
        finally:
            shutil.rmtree(Path("/dev/shm") / POOL, ignore_errors=True)
        if done.returncode:
            raise harness.JobError(done.stderr[-4000:])
        return {"kind": kind, **about, "systems": json.loads(done.stdout.splitlines()[-1])}


def slow_source(folder, mb_s):
    """Returns the environment in which the folder's source is slow."""
    library = compiled(folder, "slow_source.c", "-O2", "-shared", "-fPIC", "-ldl")
    return {
        "LD_PRELOAD": library,
        "SLOW_SOURCE_FOLDER": f"{folder}/source",
        "SLOW_SOURCE_STATE": f"{folder}/state",
        "SLOW_SOURCE_OPEN_MS": str(OPEN_MS),
        "SLOW_SOURCE_MB_S": str(mb_s),
    }


def compiled(folder, source, *flags):
    """Compiles a native program or library of the benchmarks, and returns its path."""
    program = f"{folder}/{Path(source).stem}"
    subprocess.run(
        ["cc", harness.ROOT / "benchmarks/native" / source, *flags, "-o", program], check=True
    )
    return program


def draw(path, images):
    """Writes JPEG files of some 100 kB into ten folders, and returns their total size in bytes."""
    import tensorflow as tf

    total = 0
    for number in range(images):
        pixels = np.random.default_rng(number).integers(0, 256, (224, 224, 3)).astype("uint8")
        contents = tf.io.encode_jpeg(pixels, quality=90).numpy()
        file = path / f"class{number % 10}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(contents)
        total += len(contents)
    return total


def show(cells):
    """Prints a table per measured part."""
    cells = list(cells.values())
    show_warm([cell for cell in cells if cell["kind"] == "warm"])
    show_jobs([cell for cell in cells if cell["kind"] == "jobs"])
    show_cold(cells)
    show_memory([cell for cell in cells if cell["kind"] == "memory"])
    show_nodes([cell for cell in cells if cell["kind"] == "nodes"])
    show_training([cell for cell in cells if cell["kind"] == "training"])


def rates(cell, what="samples_per_second"):
    """Returns medians of samples per second by system."""
    return {name: statistics.median(measured[what]) for name, measured in cell["systems"].items()}


def show_warm(cells):
    rows = [
        ("pixels", "", "one thread copies", "datacache", "tf.data cache", "/ copies", "/ tf.data")
    ]
    for cell in cells:
        for what, text in (
            ("samples_per_second", "whole epochs"),
            ("after_the_first", "after the first batch"),
        ):
            speeds = rates(cell, what)
            ratios = [
                ratio(cell, "datacache", "copies", what),
                ratio(cell, "datacache", "tf.data cache", what),
            ]
            absolute = [
                f"{speeds[name]:,.0f}/s" for name in ("copies", "datacache", "tf.data cache")
            ]
            rows.append((str(cell["size"]), text, *absolute, *(f"{value:.2f}" for value in ratios)))
    if cells:
        gigabytes = cells[0]["samples"] * cells[0]["size"] ** 2 * 3 / 1e9
        print(
            f"\n{gigabytes:.1f} GB read from memory in random order; medians, "
            "and medians of the rounds' ratios"
        )
        harness.show(rows)


def show_jobs(cells):
    rows = [("pixels", "first epoch of a new job", "later", "first / later", "quartiles")]
    for cell in cells:
        for name, measured in cell["systems"].items():
            ratios = [
                first / later
                for first, later in zip(measured["first"], measured["later"], strict=True)
            ]
            low, middle, high = np.percentile(ratios, [25, 50, 75])
            first, later = (
                f"{statistics.median(measured[what]):,.0f}/s" for what in ("first", "later")
            )
            rows.append(
                (
                    f"{cell['size']}, {name}",
                    first,
                    later,
                    f"{middle:.2f}",
                    f"{low:.2f} to {high:.2f}",
                )
            )
    if cells:
        print(
            "\na new process on a warm store: its first epoch and the next three, "
            "in samples per second"
        )
        harness.show(rows)


def ratio(cell, one, other, what):
    """Returns the median of ratios within a round, as the machine's speed changes over time."""
    values = [cell["systems"][name][what] for name in (one, other)]
    return statistics.median(a / b for a, b in zip(*values, strict=True))


def show_cold(cells):
    rows = [("", "samples/s", "share of limit")]
    for cell in (cell for cell in cells if cell["kind"] == "cold"):
        limit = cell["mb_s"] * 1e6 / (cell["bytes"] / cell["images"])
        rows.append((f"limit: {cell['mb_s']} MB/s", f"{limit:,.0f}", ""))
        for name, value in rates(cell).items():
            rows.append((name, f"{value:,.0f}", f"{value / limit:.2f}"))
    for cell in (cell for cell in cells if cell["kind"] == "decoding"):
        speeds = rates(cell)
        share = ratio(cell, "datacache, first epoch", "decoding", "samples_per_second")
        rows.append(("limit: decoding, on a fast source", f"{speeds['decoding']:,.0f}", ""))
        rows.append(
            ("datacache, first epoch", f"{speeds['datacache, first epoch']:,.0f}", f"{share:.2f}")
        )
        later_share = ratio(cell, "datacache, later", "decoding", "samples_per_second")
        rows.append(
            ("datacache, later", f"{speeds['datacache, later']:,.0f}", f"{later_share:.2f}")
        )
    if len(rows) > 1:
        print("\nJPEG files of a slow source, 4 ms per open")
        harness.show(rows)


def show_memory(cells):
    rows = [("ranks", "data", *HELD)]
    for ranks in sorted({cell["ranks"] for cell in cells}):
        measured = {
            cell["what"]: cell["systems"][cell["what"]] for cell in cells if cell["ranks"] == ranks
        }
        data = next(iter(measured.values()))["data"]
        held = (
            f"{measured[name]['held'] / 1e9:.2f} GB" if name in measured else "" for name in HELD
        )
        rows.append((str(ranks), f"{data / 1e9:.2f} GB", *held))
    if cells:
        print("\nmemory that ranks of one node hold together, each page counted once")
        harness.show(rows)


def show_training(cells):
    rows = [
        ("MB/s", "", "first epoch", "later epochs", "samples/s later", "I/O time of a later step")
    ]
    for cell in cells:
        systems = cell["systems"]
        alone = later(systems["no reading"])
        for name, measured in systems.items():
            first, steps = measured["epochs"][0]["seconds"], measured["epochs"][0]["steps"]
            waiting = max(0.0, later(measured) - alone) / steps
            speed = measured["samples"] / later(measured)
            times = (
                f"{first:.1f} s",
                f"{later(measured):.1f} s",
                f"{speed:,.0f}",
                f"{waiting * 1e3:.1f} ms",
            )
            rows.append((str(cell["mb_s"]), name, *times))
    if cells:
        print("\ntraining with steps of 100 ms on the slow source (Fig. 9 of CommLib)")
        harness.show(rows)


def show_nodes(cells):
    for cell in cells:
        systems = cell["systems"]
        steps = {
            name: statistics.median(systems[name]["step_s"]) for name in ("replicate", "split")
        }
        ratios = [
            b / a
            for a, b in zip(
                systems["replicate"]["rounds_s"], systems["split"]["rounds_s"], strict=True
            )
        ]
        print(
            f"\n{cell['layout']} ranks, {cell['rate']}/s: an epoch of a partitioned cache sends "
            f"{systems['bytes']['measured'] / 1e6:.2f} MB over a node's link, predicted "
            f"{systems['bytes']['predicted'] / 1e6:.2f};\n"
            f"steps take {1e3 * steps['replicate']:.0f} ms on local data "
            f"and {1e3 * steps['split']:.0f} ms on a partition "
            f"(median of the rounds' ratios {statistics.median(ratios):.3f})"
        )


def later(measured):
    """Returns the median seconds of all epochs after the first."""
    return statistics.median(epoch["seconds"] for epoch in measured["epochs"][1:])


def plot(cells, path):
    """Plots samples per second in training: a row per source, with first and later epochs."""
    trained = [cell for cell in cells.values() if cell["kind"] == "training"]

    def draw(_, axes):
        for index, axis in enumerate(axes):
            cell, later_ones = trained[index // 2], index % 2
            speeds = {
                name: measured["samples"]
                / (later(measured) if later_ones else measured["epochs"][0]["seconds"])
                for name, measured in cell["systems"].items()
            }
            figures.bars(axis, {name: speeds[name] for name in figures.in_order(speeds)})
            epochs = "later epochs" if later_ones else "first epoch"
            axis.set_title(f"source of {cell['mb_s']} MB/s, {epochs}")
            axis.set_xlabel("samples per second")
            axis.tick_params(labelleft=not later_ones)

    if trained:
        figures.save(path, 2 * len(trained), draw, height_in=2.1)


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
