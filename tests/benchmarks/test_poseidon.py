"""Tests the numbers that `benchmarks.poseidon` computes from its measurements."""

import pytest

from benchmarks import architectures, best_scheme, poseidon


def test_best_scheme_agrees_with_poseidon():
    """VGG19-22K uses factors, and GoogLeNet's classifier the parameter server (section 5.2)."""
    (googlenet,) = best_scheme.rows_of(architectures.model("googlenet"), 128, [2, 16])
    assert googlenet[:4] == ("googlenet", "128", "dense1", "1024 x 1000")
    assert [text.split()[0] for text in googlenet[4:]] == ["factors", "ps"]
    layers = list(best_scheme.rows_of(architectures.model("vgg19_22k"), 32, [32]))
    assert [row[4].split()[0] for row in layers] == ["factors"] * 3


def _poseidon_cell(model, layout, gbit, systems):
    task = {"model": model, "shrink": 1, "dilation": 4, "systems": list(systems)}
    compute_s = 4 * architectures.model(model).step_s
    figures = {
        system: {
            "step_s": [compute_s / share],
            "ranks_s": [[compute_s / share]],
            "sent_bytes": 1e6,
            "node_bytes": [[1, 2]],
        }
        for system, share in systems.items()
    }
    return {
        "model": model,
        "layout": layout,
        "gbit": gbit,
        "rate_bits_per_s": 1e9,
        "task": task,
        "systems": figures,
    }


def test_speedups_stalls_and_traffic_follow_from_step_times(capsys, tmp_path):
    cells = {
        "a": _poseidon_cell(
            "vgg19_22k", "16x1", 10.0, {"ps-late": 0.25, "ps": 0.5, "hybcomm": 0.97}
        ),
        "b": _poseidon_cell("vgg19_22k", "8x1", 40.0, {"ps": 1.0}),
        "c": _poseidon_cell("vgg19_32", "8x1", 40.0, {"ps": 1.0, "ps-adam": 0.5, "hybcomm": 1.0}),
    }
    assert poseidon.speedups(cells)["vgg19_22k", 10.0, "16x1"]["hybcomm"] == pytest.approx(15.52)
    poseidon.show(cells)
    shown = capsys.readouterr().out
    assert "4.0 (75%)" in shown
    assert "ps-late 4, hybcomm 16" in shown
    assert "ps-adam: a node sends 1 B to 1 B a step, and receives 2 B to 2 B" in shown
    poseidon.plot(cells, tmp_path / "poseidon.png")


def test_poseidons_jobs_match_the_figures(monkeypatch):
    monkeypatch.setattr("sys.argv", ["poseidon", "--full"])
    options = poseidon.parse_arguments()
    jobs = list(poseidon.planned(options).values())
    assert len(jobs) == 3 * 4 + 3 * 3 + 3 + 1
    assert jobs[0]["layout"] == "16x1"
    assert {job["gbit"] for job in jobs if job["model"] == "googlenet"} == {40.0, 2.0, 5.0, 10.0}
