"""Snapshots remain complete if a process is killed, and damaged snapshots are refused."""

import json
import os
import shutil

import keras
import numpy as np
import pytest

import tfposeidon as tp
from tests.helpers.models import rank_variables
from tests.state.resuming import fit_with_checkpoint
from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import HorovodWire
from tfposeidon.state.snapshots import SnapshotError, Snapshots

WIRE = HorovodWire(Topology(0, ((0,),)), {})


def write(files, meta, shared, own):
    files.start(meta, shared, own)
    files.finish()


def test_an_empty_folder_starts_a_new_run(tmp_path):
    assert Snapshots(tmp_path / "none", WIRE).read_latest() is None


def test_older_snapshots_are_deleted_regardless_of_their_step(tmp_path):
    files = Snapshots(tmp_path, WIRE, keep=2)
    for step in (1, 2, 3, 3):
        write(files, {}, {"a": [np.array(step)]}, {})
    assert sorted(os.listdir(tmp_path)) == ["snapshot-000003", "snapshot-000004"]


def test_only_snapshots_are_deleted(tmp_path):
    """Copies and archives of users remain. Incomplete snapshots of a killed job do not."""
    files = Snapshots(tmp_path, WIRE, keep=1)
    write(files, {}, {}, {})
    shutil.copytree(tmp_path / "snapshot-000001", tmp_path / "snapshot-000001-best")
    (tmp_path / "snapshot-000001.tar").touch()
    (tmp_path / ".snapshot-000002-abcd.part").mkdir()
    files.start({}, {}, {})
    assert not (tmp_path / ".snapshot-000002-abcd.part").exists()
    files.finish()
    assert sorted(os.listdir(tmp_path)) == [
        "snapshot-000001-best",
        "snapshot-000001.tar",
        "snapshot-000002",
    ]


def test_damaged_snapshots_do_not_count_as_retained(tmp_path):
    files = Snapshots(tmp_path, WIRE, keep=2)
    for _ in range(2):
        write(files, {}, {}, {})
    (tmp_path / "snapshot-000002" / "model.npz").write_bytes(b"")
    files = Snapshots(tmp_path, WIRE, keep=2)
    files.read_latest()
    write(files, {}, {}, {})
    assert (tmp_path / "snapshot-000001").exists()


def test_a_folder_with_only_damaged_snapshots_is_refused(tmp_path):
    write(Snapshots(tmp_path, WIRE), {}, {"a": [np.arange(1000)]}, {})
    path = tmp_path / "snapshot-000001" / "model.npz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        SnapshotError, match=r"must be readable on every rank.*snapshot-000001.*or empty it"
    ):
        Snapshots(tmp_path, WIRE).read_latest()


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SnapshotError, match=r"could not be written .*no complete snapshot exists"):
        write(Snapshots(tmp_path / "file" / "folder", WIRE), {}, {}, {})


@pytest.mark.slow
def test_other_buckets_receive_the_saved_state(tmp_path):
    """The state includes momentum by bucket. A resumed run with small buckets has equal weights."""

    def trained(folder, epochs, bucket_bytes):
        def optimizer():
            scheme = tp.schemes.HiTopK(momentum=0.9, min_elements=0, warmup_steps=100)
            return tp.DistributedOptimizer(
                keras.optimizers.SGD(0.1), scheme, bucket_bytes=bucket_bytes
            )

        return fit_with_checkpoint(optimizer, folder, epochs)

    trained(tmp_path / "a", 1, 1 << 22)
    resumed, whole = trained(tmp_path / "a", 2, 64), trained(tmp_path / "b", 2, 1 << 22)
    assert len(resumed.optimizer.plan.buckets) > len(whole.optimizer.plan.buckets)
    assert {
        float(v.numpy()) for v in rank_variables(resumed.optimizer) if v.name.endswith("_steps:0")
    } == {6.0}
    for a, b in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_snapshots_of_another_release_are_refused(tmp_path):
    fit_with_checkpoint(_accumulating, tmp_path, 1)
    path = tmp_path / "snapshot-000001" / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in meta.items() if key != "format"}))
    rule = "must have format 11. Received: format 1 in .*resume=False"
    with pytest.raises(SnapshotError, match=rule):
        fit_with_checkpoint(_accumulating, tmp_path, 1)
    # The error proposes this argument.
    assert fit_with_checkpoint(_accumulating, tmp_path, 1, resume=False).history.epoch == [0]


def _accumulating():
    return tp.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4))


@pytest.mark.slow
def test_another_number_of_ranks_preserves_the_sum(tmp_path):
    first = fit_with_checkpoint(_accumulating, tmp_path, 1)
    held = [v.numpy() for v in rank_variables(first.optimizer)]
    folder = tmp_path / "snapshot-000001"
    shutil.copy(folder / "rank-0.npz", folder / "rank-1.npz")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"nodes": [[0], [1]]}))
    resumed = fit_with_checkpoint(_accumulating, tmp_path, 1)
    for now, then in zip(rank_variables(resumed.optimizer), held, strict=True):
        factor = 2 if then.dtype.kind == "f" else 1
        np.testing.assert_allclose(now.numpy(), factor * then)
    assert any(np.abs(then).max() > 0 for then in held)
