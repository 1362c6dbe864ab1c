"""Fixtures: the modules and the script of the DAWNBench example, and synthetic images."""

from types import SimpleNamespace

import pytest

from tests.launch import ROOT

TRAIN, TEST, SIZE = 30, 20, 16
"""Numbers of training and test images, and their side in pixels."""


@pytest.fixture(scope="module")
def example():
    """Yields the modules of the example, which are in the folder of its script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        from data import draw_shapes
        from dawnbench import images, recipes, records, resnet

        yield SimpleNamespace(
            draw_shapes=draw_shapes, images=images, recipes=recipes, records=records, resnet=resnet
        )


@pytest.fixture(scope="module")
def script(example):
    """Yields the module of the script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        import dawnbench_resnet50

        yield dawnbench_resnet50


@pytest.fixture(scope="module")
def drawn(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "shapes"
    example.draw_shapes.draw(folder, train=TRAIN, test=TEST, size=SIZE)
    return folder
