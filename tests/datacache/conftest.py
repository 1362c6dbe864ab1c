"""Provides fixtures: a folder of images, and a function that opens caches."""

import pytest

import datacache
from tests import drawn
from tests.datacache.caches import SAMPLES


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return drawn.folder(tmp_path_factory.mktemp("images"), SAMPLES)


@pytest.fixture
def opened(tmp_path):
    """Opens caches in the test's temporary folder, and closes them afterwards."""
    caches = []

    def open_cache(source, preprocess=drawn.decode, **changed):
        if not hasattr(source, "identity"):
            source = datacache.from_folder(source)
        caches.append(
            datacache.Cache(source, preprocess, **{"memory": tmp_path / "memory"} | changed)
        )
        return caches[-1]

    yield open_cache
    for cache in caches:
        cache.close()
