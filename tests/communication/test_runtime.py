"""Tests the start: limits, layouts, GPUs, and incompatible builds of Horovod."""

import contextlib
import os
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import tensorflow as tf

import tfposeidon as tp
from tfposeidon.commands import check
from tfposeidon.commands.versions import InstallError
from tfposeidon.communication import failure, launcher, runtime, start


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(runtime, "_wire", None)
    for name in (launcher.STALL_LIMIT, launcher.STALL_WARNING, launcher.TRANSPORT_LIMIT):
        monkeypatch.delenv(name, raising=False)


def test_a_second_init_returns_the_running_job():
    assert tp.init() is tp.init()
    assert (tp.rank(), tp.size()) == (0, 1)


@pytest.mark.parametrize(
    ("asked", "warning", "limit"), [(None, "60", "300"), (20, "5", "20"), (3600, "60", "3600")]
)
def test_stall_limits_also_set_the_warning_time(fresh, asked, warning, limit):
    start.set_limits(asked, 45)
    assert os.environ[launcher.STALL_WARNING] == warning
    assert os.environ[launcher.STALL_LIMIT] == limit
    assert os.environ[launcher.TRANSPORT_LIMIT] == "45"


def test_environment_variables_are_not_overwritten(fresh, monkeypatch):
    monkeypatch.setenv(launcher.STALL_LIMIT, "77")
    start.set_limits(None, None)
    assert os.environ[launcher.STALL_LIMIT] == "77"
    assert launcher.TRANSPORT_LIMIT not in os.environ


def test_jobs_with_a_server_have_a_longer_transport_timeout(fresh, monkeypatch):
    start.set_limits(None, None, serves=True)
    assert os.environ[launcher.TRANSPORT_LIMIT] == "300"
    start.set_limits(None, 45, serves=True)
    assert os.environ[launcher.TRANSPORT_LIMIT] == "45"
    start.set_limits(None, None, serves=True)
    assert os.environ[launcher.TRANSPORT_LIMIT] == "45"


@pytest.mark.parametrize("name", ["stall_timeout_s", "transport_timeout_s"])
def test_invalid_limits_are_refused(fresh, name):
    for server_rank in (None, 0):
        with pytest.raises(
            ValueError, match=rf"`{name}` must be a finite number >= 1\. Received: {name}=0"
        ):
            tp.init(**{name: 0}, server_rank=server_rank)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ({"horovod": None, "horovod.tensorflow": None}, "tfposeidon requires Horovod"),
        ({"horovod.tensorflow": None}, "install --horovod-only"),
    ],
)
def test_a_missing_horovod_names_the_command(fresh, module, message):
    with mock.patch.dict(sys.modules, module), pytest.raises(ImportError, match=message):
        tp.init()


def test_a_horovod_without_tensorflow_names_the_command(fresh, monkeypatch):
    class NotBuilt:
        def find_spec(self, name, path=None, target=None):
            if name == "horovod.tensorflow":
                raise ImportError("Extension horovod.tensorflow has not been built")

    monkeypatch.setattr(sys, "meta_path", [NotBuilt(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "horovod.tensorflow")
    with pytest.raises(
        ImportError,
        match=r"imported with this TensorFlow .*Run: python -m tfposeidon install --horovod-only",
    ):
        tp.init()


def _running(size, local_size):
    return SimpleNamespace(rank=lambda: 0, size=lambda: size, local_size=lambda: local_size)


def test_a_running_horovod_is_used_without_process_sets():
    assert start.adopt(_running(4, 4), None, None).topology.nodes == ((0, 1, 2, 3),)


def test_a_running_horovod_without_required_process_sets_is_refused():
    with pytest.raises(
        RuntimeError, match=r"needs? 4 process sets\. Replace hvd.init\(\) with tfposeidon.init\(\)"
    ):
        start.adopt(_running(4, 2), None, None)
    with pytest.raises(RuntimeError, match="need 3 process sets"):
        start.adopt(_running(4, 4), None, server_rank=0)


def test_another_layout_is_refused():
    topology = runtime.Topology.regular(0, 4, 2)
    with pytest.raises(RuntimeError, match="already runs as 4 rank"):
        runtime.check_same_job(topology, 4, None)


def test_each_rank_of_a_node_uses_its_own_gpu():
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(4)]
    with (
        mock.patch.object(tf.config, "list_physical_devices", return_value=gpus),
        mock.patch.object(tf.config, "set_visible_devices") as visible,
        mock.patch.object(tf.config.experimental, "set_memory_growth") as growth,
    ):
        start.choose_gpu(2, 4)
    visible.assert_called_once_with(gpus[2], "GPU")
    growth.assert_called_once_with(gpus[2], True)


@pytest.mark.parametrize("pin_gpu", [True, False])
def test_init_chooses_the_gpu_of_the_local_rank(monkeypatch, fresh, pin_gpu):
    monkeypatch.setattr("horovod.tensorflow.local_rank", lambda: 1)
    monkeypatch.setattr("horovod.tensorflow.local_size", lambda: 2)
    start.choose_own_gpu.cache_clear()
    found = SimpleNamespace(topology=runtime.Topology.regular(0, 1, 1))
    monkeypatch.setattr(start, "find_peers", lambda _: None)
    monkeypatch.setattr(start, "start_horovod", lambda *_: found)
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]
    with (
        mock.patch.object(tf.config, "list_physical_devices", return_value=gpus),
        mock.patch.object(tf.config, "set_visible_devices") as visible,
        mock.patch.object(tf.config.experimental, "set_memory_growth"),
        mock.patch.object(failure, "watch"),
    ):
        tp.init(pin_gpu=pin_gpu)
    assert visible.mock_calls == ([mock.call(gpus[1], "GPU")] if pin_gpu else [])


def test_an_unknown_interface_is_refused(monkeypatch):
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "eth77")
    with pytest.raises(ValueError, match=r"HOROVOD_GLOO_IFACE must .* 'eth77' on .*, which has lo"):
        start.check_interface()
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    start.check_interface()


@pytest.mark.parametrize(("ranks", "visible"), [(1, 4), (4, 1), (4, 4)])
@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_gpus_initialized_by_all_ranks_are_refused(caplog, ranks, visible, error):
    with (
        mock.patch.object(tf.config, "list_physical_devices", return_value=["GPU"] * 4),
        mock.patch.object(tf.config, "get_visible_devices", return_value=["GPU"] * visible),
        mock.patch.object(tf.config, "set_visible_devices", side_effect=error("late")),
        pytest.raises(RuntimeError, match=r"initialized 4 GPUs, and 4 ranks.*Call tfposeidon.init")
        if ranks > 1 and visible > 1
        else contextlib.nullcontext(),
    ):
        start.choose_gpu(0, ranks)
    assert ("visible GPUs stay unchanged" in caplog.text) == (1 in (ranks, visible))


@pytest.mark.parametrize(
    ("gpus", "ranks", "warned"), [(0, 1, False), (1, 1, False), (8, 1, True), (8, 8, False)]
)
def test_unused_gpus_are_named(caplog, gpus, ranks, warned):
    with (
        mock.patch.object(tf.config, "list_physical_devices", return_value=["GPU"] * gpus),
        mock.patch.object(tf.config, "set_visible_devices"),
        mock.patch.object(tf.config.experimental, "set_memory_growth"),
    ):
        start.choose_gpu(0, ranks)
    assert ("one of the 8 GPUs of this node is used" in caplog.text) == warned


@pytest.mark.parametrize(
    ("gpus", "ranks", "nccl", "refused"),
    [(0, 2, True, False), (1, 2, False, False), (2, 2, True, False), (1, 2, True, True)],
)
def test_ranks_share_a_gpu_without_nccl_only(monkeypatch, gpus, ranks, nccl, refused):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with (
        mock.patch.object(tf.config, "list_physical_devices", return_value=["GPU"] * gpus),
        mock.patch("horovod.tensorflow.nccl_built", return_value=nccl),
        pytest.raises(RuntimeError, match=r"Received: 2 ranks .* 1 GPU\(s\).*--no-cuda")
        if refused
        else contextlib.nullcontext(),
    ):
        start.require_gpu_per_rank(ranks)
    # If visible GPUs are restricted, each rank may see a different one.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with (
        mock.patch.object(tf.config, "list_physical_devices", return_value=["GPU"]),
        mock.patch("horovod.tensorflow.nccl_built", return_value=True),
    ):
        start.require_gpu_per_rank(8)
        # Without the launcher's number of ranks on this node, sharing cannot be detected.
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        start.require_gpu_per_rank(None)


@pytest.mark.parametrize(
    ("gpus", "ranks", "nccl", "refused"),
    [(0, 1, False, False), (1, 1, False, True), (1, 2, False, False), (1, 1, True, False)],
)
def test_check_requires_nccl_if_each_rank_has_a_gpu(gpus, ranks, nccl, refused):
    with (
        mock.patch.object(tf.config, "list_physical_devices", return_value=["GPU"] * gpus),
        mock.patch("horovod.tensorflow.nccl_built", return_value=nccl),
        mock.patch.object(check, "_nccl", return_value="none"),
        pytest.raises(InstallError, match="--horovod-only --cuda")
        if refused
        else contextlib.nullcontext(),
    ):
        check.horovod_build(ranks)


@pytest.mark.slow
def test_check_reports_versions_sums_and_the_platform(capsys, monkeypatch):
    cluster = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", cluster)
    monkeypatch.setenv("PET_NNODES", "2")
    assert check.main(SimpleNamespace(ranks_per_node=None, network=None)) == 0
    said = capsys.readouterr().out
    assert f"tensorflow        {tf.__version__}" in said
    assert "averages are correct on all 1 rank(s)" in said
    assert "TF_CONFIG: rank 0 of 1; TrainJob lacks PET_NODE_RANK" in said
    assert "separates jobs but is not secret" in said


def test_check_reports_the_platform_before_an_invalid_token(capsys, monkeypatch, tmp_path):
    token = tmp_path / "token"
    token.write_text("")
    token.chmod(0o600)
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("TFPOSEIDON_TOKEN_FILE", str(token))
    assert check.main(SimpleNamespace(ranks_per_node=None, network=None)) == 1
    said = capsys.readouterr().err
    assert "TrainJob lacks PET_NODE_RANK" in said
    assert "tfposeidon check: A token file must hold a token" in said


def test_check_reports_what_it_has_found_before_an_error(capsys, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "2")
    error = TimeoutError("rank 1 did not register")
    with mock.patch.object(runtime, "init", side_effect=error):
        assert check.main(SimpleNamespace(ranks_per_node=None, network=None)) == 1
    rows, _, last = capsys.readouterr().err.rstrip().rpartition("\n")
    assert last == "tfposeidon check: rank 1 did not register"
    assert "python  " in rows
    assert "TrainJob lacks PET_NODE_RANK" in rows


@pytest.mark.parametrize(
    ("versions", "remedy"),
    [
        ({"horovod": None}, "horovod, which is not installed. Run: python -m tfposeidon install"),
        ({"horovod": "0.28.1"}, "Received: 0.28.1 without patches"),
        ({"keras": "3.9.0"}, "tfposeidon requires Keras 3.15.*. Received: 3.9.0"),
    ],
)
def test_check_names_the_remedy(monkeypatch, capsys, versions, remedy):
    real = check.version_of
    monkeypatch.setattr(
        check,
        "version_of",
        lambda name: versions.get(name, "x") if name in versions else real(name),
    )
    assert check.main(SimpleNamespace(ranks_per_node=None, network=None)) == 1
    assert remedy in capsys.readouterr().err
