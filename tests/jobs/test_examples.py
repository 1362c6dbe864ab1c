"""Runs the examples as users start them."""

import json
import math
import random
import re
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.launch import ROOT, WITH_SKLEARN, ahead, finish, horovodrun, kill, lab

EXAMPLES = ROOT / "examples"
SCRIPT = EXAMPLES / "image_folder.py"


def image_folder(start):
    """Runs the example on images that it writes into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        digits = ("--folder", f"{folder}/digits")
        if start == "lab":
            command = (sys.executable, SCRIPT, "--partition", "split", *digits)
            return lab("--nodes 2 --inter 200mbit", *command, environment=WITH_SKLEARN)
        options = ("--tfds", "--epochs", "6", "--memory", f"{folder}/memory", *digits)
        return horovodrun(2, SCRIPT, *options, environment=WITH_SKLEARN)


@ahead(image_folder)
@pytest.mark.parametrize("start", ["lab", "horovodrun"])
def test_image_folder_reads_the_source_only_in_a_cold_run(start, outcome):
    done = outcome
    assert done.returncode == 0, done.stdout[-4000:]
    read = [
        float(megabytes)
        for megabytes in re.findall(r"(?:cold|warm): .* s, ([\d.]+) MB read", done.stdout)
    ]
    assert len(read) == 2, done.stdout[-4000:]
    assert read[0] > 0.1
    assert read[1] == 0


@ahead(lambda: horovodrun(2, EXAMPLES / "keras_digits.py", environment=WITH_SKLEARN))
def test_keras_digits_reaches_its_accuracy(outcome):
    """`make demo` starts the script in this way; it fails below an accuracy of 97 %."""
    assert outcome.returncode == 0, outcome.stdout[-4000:]


@ahead(lambda: horovodrun(2, EXAMPLES / "custom_loop.py", environment=WITH_SKLEARN))
def test_the_custom_loop_reaches_its_accuracy(outcome):
    """The script fails below an accuracy of 95 %."""
    assert outcome.returncode == 0, outcome.stdout[-4000:]
    assert "Plan for 2 rank(s)" in outcome.stdout


def gan():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.png"
        options = ("--epochs", "30", "--images", path)
        done = horovodrun(2, EXAMPLES / "gan.py", *options, environment=WITH_SKLEARN)
        return done, path.read_bytes()[:4] if path.exists() else b""


@ahead(gan)
def test_the_gan_draws_images_with_the_mean_of_digits(outcome):
    """The script fails if the mean of its images is far from the mean digit."""
    done, begin = outcome
    assert done.returncode == 0, done.stdout[-4000:]
    assert begin == b"\x89PNG"


def transformers():
    arguments = ("--steps", "30", "--width", "64", "--blocks", "1", "--goal", "9")
    script, exact = EXAMPLES / "transformer.py", ("--scheme", "hybcomm")
    return [horovodrun(ranks, script, *arguments, *exact) for ranks in (1, 2)]


@ahead(transformers)
def test_the_transformer_reaches_the_loss_of_one_process(outcome):
    """Two ranks send rows of embeddings and factors of products."""
    losses = []
    for done in outcome:
        assert done.returncode == 0, done.stdout[-4000:]
        losses.append(float(re.search(r"loss per word: ([\d.]+)", done.stdout)[1]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert losses[0] < 8, "training must reduce the loss"


def dawnbench():
    """Runs all phases, resumes the complete run, and then runs them with kills in another folder.

    Returns:
      The finished processes, the records of the first run, and the result of `start_and_kill` for
      each kill. The last process finished the run that was killed.
    """
    pauses = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / name for name in ("whole", "killed")]
        options = ("--preset", "tiny", "--shortest", "--precision", "mixed_float16")
        options += ("--snapshot-steps", "1", "--memory", f"{folder}/memory")
        script = (sys.executable, EXAMPLES / "dawnbench_resnet50.py", *options)
        whole, killed = ((*script, "--out", out) for out in outs)
        runs = [lab(LAB, *whole) for _ in range(2)]
        records = outs[0] / "records.jsonl"
        lines = records.read_text().splitlines() if records.exists() else []
        kills = [
            start_and_kill(killed, outs[1], number, pauses.uniform(0, 0.1), bool(index % 2))
            for index, number in enumerate(KILLED_AFTER)
        ]
        return [*runs, lab(LAB, *killed)], [json.loads(line) for line in lines], kills


LAB = "--nodes 2 --inter 200mbit --show first"


@ahead(dawnbench)
def test_dawnbench_resumes_after_kills_with_equal_weights(outcome):
    """The four resolutions follow the paper's schedule, in half precision.

    A complete run trains nothing more. After each kill, the run resumes from the newest snapshot,
    and its final weights equal those of a run without kills.
    """
    runs, lines, kills = outcome
    for done in runs:
        assert done.returncode == 0, done.stdout[-4000:]
    first, second, last = (done.stdout for done in runs)
    assert [(line["pixels"], line["batch"]) for line in lines] == SIZES
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert all(0 <= line["val_accuracy"] <= 1 for line in lines)
    schemes = [line["scheme"].partition("(")[0] for line in lines]
    assert schemes == ["hitopk", "torus2d", "torus2d", "torus2d"]
    assert len(re.findall(r"phase \d of 4", first)) == 4
    assert not re.findall(r"phase \d of 4", second)
    ends = [re.search(r"accuracy after all epochs: .*", one)[0] for one in (first, second)]
    assert ends[0] == ends[1]
    _check_kills([*(output for output, _, _ in kills), last], kills)
    weights = [re.search(r"weights ([0-9a-f]{8})", one)[1] for one in (first, last)]
    assert weights[0] == weights[1]
    assert "interrupted in 1 epoch(s)" in last
    assert "interrupted" not in first


def _check_kills(outputs, kills):
    assert all(is_killed for _, _, is_killed in kills)
    assert "resumed from" not in outputs[0]
    for (_, place, _), output in zip(kills, outputs[1:], strict=True):
        # Use the first match, because each later phase resumes from a snapshot, too.
        found = re.search(r"resumed from .* (at epoch \d+, batch \d+\.)", output)
        assert found, output[-4000:]
        assert found[1] == place


SIZES = [(24, 32), (30, 32), (38, 32), (46, 16)]
"""Pixels and global batch of the small run's phases."""


KILLED_AFTER = (3, 17)
"""Snapshots after which the small run is killed: in its first phase, and in a later phase while it
writes the next snapshot."""


def newest_snapshot(out):
    names = sorted(path.name for path in out.glob("snapshots/snapshot-*"))
    return int(names[-1].rpartition("-")[2]) if names else 0


def snapshots_in_parts(out):
    return set(out.glob("snapshots/.snapshot-*.part"))


def start_and_kill(command, out, number, pause_s, while_writing):
    """Starts the run in the lab, and kills it after it has written a snapshot.

    Returns:
      The output; the position of the newest snapshot, which the next start must print; and
      whether the kill ended the run.
    """
    # Ignore incomplete snapshots that an earlier kill left.
    left = snapshots_in_parts(out)
    process = lab(LAB, *command, background=True)
    while newest_snapshot(out) < number and process.poll() is None:
        time.sleep(0.02)
    time.sleep(pause_s)
    while while_writing and not snapshots_in_parts(out) - left and process.poll() is None:
        time.sleep(0.001)
    is_killed = process.poll() is None
    kill(process)
    output = finish(process).stdout
    folder = out / "snapshots" / f"snapshot-{newest_snapshot(out):06d}"
    meta = json.loads((folder / "meta.json").read_text())
    return output, f"at epoch {meta['epoch']}, batch {meta['batches']}.", is_killed


def test_every_example_has_a_test():
    assert {file.name for file in EXAMPLES.glob("*.py")} == {
        "custom_loop.py",
        "dawnbench_resnet50.py",
        "gan.py",
        "image_folder.py",
        "keras_digits.py",
        "transformer.py",
    }
