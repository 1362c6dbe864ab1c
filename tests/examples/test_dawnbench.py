"""Tests recipes, model, caches and dry run of the DAWNBench example."""

import re
from collections import Counter

import keras
import numpy as np
import pytest

import datacache
import tfposeidon as tp
from tests.examples.conftest import TEST, TRAIN

CONV, NORM = keras.layers.Conv2D, keras.layers.BatchNormalization


def test_rates_follow_batches_and_epochs(example):
    recipes = example.recipes
    recipe = recipes.recipe("paper", "paper")
    assert recipe.epochs == 28
    assert recipe.rate_at(0.0, 128) == 0.0
    assert recipe.rate_at(5.0, 128) == 29.0
    assert recipe.rate_at(5.0, 64) == 14.5
    assert recipe.rate_at(28.0, 128) == 0.0
    assert recipe.phases[0].scheme.name == "hitopk"
    assert {phase.scheme.name for phase in recipe.phases[1:]} == {"torus2d"}


def test_phases_are_those_of_the_paper(example):
    """The values are those of section 5.6 and Table 4 of CommLib."""
    recipe = example.recipes.recipe("paper", "paper")
    assert [(phase.epochs, phase.size, phase.batch) for phase in recipe.phases] == [
        (13, 96, 256),
        (11, 128, 256),
        (3, 224, 256),
        (1, 288, 128),
    ]
    first, *others = [phase.scheme for phase in recipe.phases]
    assert first == tp.schemes.HiTopK(density=0.01, wire_dtype="float16")
    assert others == [tp.schemes.Torus2D(wire_dtype="float16")] * 3
    assert (recipe.top, recipe.target) == (5, 0.93)


@pytest.mark.slow
def test_the_model_of_the_paper_is_resnet_50_v1_5(example):
    """Strides are in the 3 x 3 convolutions, and each block begins as the identity."""
    recipe = example.recipes.recipe("paper", "paper")
    model = example.resnet.resnet(classes=1000, **recipe.model)
    values = [
        sum(np.prod(variable.shape) for variable in variables)
        for variables in (model.trainable_variables, model.variables)
    ]
    assert values == [25_557_032, 25_610_152]
    kinds = {kind: [one for one in model.layers if isinstance(one, kind)] for kind in (CONV, NORM)}
    strided = Counter(one.kernel_size for one in kinds[CONV] if one.strides == (2, 2))
    # These are the stem, the first block of three stages, and the projections of these blocks.
    assert strided == {(7, 7): 1, (3, 3): 3, (1, 1): 3}
    gammas = [one.gamma.numpy() for one in kinds[NORM]]
    assert Counter(len(gamma) for gamma in gammas if not gamma.any()) == {
        256: 3,
        512: 4,
        1024: 6,
        2048: 3,
    }
    assert all((gamma == 1).all() for gamma in gammas if gamma.any())


@pytest.mark.parametrize(
    ("without", "differs"),
    [
        ("sparse", {"schemes": ["torus2d"] * 4}),
        ("lars", {"peak": 12.8}),
        ("resizing", {"sizes": [288] * 4}),
        ("cache", {}),
    ],
)
def test_each_part_can_be_omitted(script, tmp_path, without, differs):
    """Omitting a part changes one setting and no other."""

    def seen(*arguments):
        options = script.parse_arguments(["--out", str(tmp_path), *arguments])
        recipe = script.recipe_of(options)
        return {
            "schemes": [phase.scheme.name for phase in recipe.phases],
            "peak": recipe.rate_at(5.0, 128),
            "sizes": [phase.size for phase in recipe.phases],
            "rest": [(phase.epochs, phase.batch) for phase in recipe.phases],
        }

    assert seen("--without", without) == seen() | differs


@pytest.mark.parametrize("without", [[], ["lars"]])
def test_without_lars_the_optimizer_is_sgd(script, tmp_path, without):
    tp.init()
    options = _options(script, tmp_path, *(["--without", *without] if without else []))
    optimizer = script.compiled(script.recipe_of(options), 10, options).optimizer.inner_optimizer
    assert type(optimizer) is (keras.optimizers.SGD if without else tp.optimizers.LARS)


@pytest.mark.slow
@pytest.mark.parametrize("variables", [[], ["--variables"]])
def test_a_dry_run_prints_phases_memory_and_plans(script, monkeypatch, capsys, variables):
    """A dry run creates no files. `--variables` adds the plan of each scheme."""
    monkeypatch.setattr("sys.argv", ["dawnbench_resnet50.py", "--dry-run", *variables])
    assert script.main() == 0
    lines = capsys.readouterr().out.splitlines()
    phases = [line.split() for line in lines if re.match(r"(96|128|224|288) ", line)]
    assert [(one[0], one[1], one[2]) for one in phases[:4]] == [
        ("96", "13", "520"),
        ("128", "11", "440"),
        ("224", "3", "120"),
        ("288", "1", "79"),
    ]
    schemes = [one[-1] for one in phases[4:]]
    assert "hitopk(wire_dtype=float16)" in " ".join(phases[4])
    assert schemes[1:] == ["torus2d(wire_dtype=float16)"] * 3
    # The model has 25,610,152 values, of which 25,557,032 have a gradient and a velocity.
    assert any("306.90 MB per rank" in line for line in lines)
    # `--variables` prints a plan for each of the two schemes.
    assert sum(line.startswith("Plan for 128 rank(s)") for line in lines) == 2 * len(variables)


def test_help_lists_the_fixed_hyperparameters(script, capsys):
    with pytest.raises(SystemExit):
        script.parse_arguments(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "paper: the rate of LARS rises in 5 epochs to 29 for 32768 images per step" in told
    assert "power 2; momentum 0.9, weight decay 5e-05, label smoothing 0.1" in told
    assert "the target is 93 % top-5." in told


def test_variables_require_a_dry_run(script):
    with pytest.raises(SystemExit):
        script.parse_arguments(["--variables", "--out", "x"])


def _options(script, out, *arguments):
    return script.parse_arguments(["--preset", "tiny", "--out", str(out), *arguments])


def test_a_folder_accepts_only_its_own_settings(script, tmp_path, monkeypatch):
    """A run resumes with its options in any order; the error names options that differ."""
    tp.init()
    out = tmp_path / "run"
    script.keep_recipe(_options(script, out, "--without", "lars", "cache"))
    script.keep_recipe(_options(script, out, "--without", "cache", "lars"))
    with pytest.raises(SystemExit, match=r"same run.*seed=1 instead of 0, without=\['cache'\]"):
        script.keep_recipe(_options(script, out, "--without", "cache", "--seed", "1"))
    monkeypatch.setattr(tp, "size", lambda: 4)
    with pytest.raises(SystemExit, match=r"with ranks=4 instead of 1\. Use another folder"):
        script.keep_recipe(_options(script, out, "--without", "cache", "lars"))


@pytest.fixture
def caches(script, example, drawn, tmp_path):
    """Yields a function from options to caches of the synthetic images, and closes them."""
    tp.init()
    opened = []

    def opened_with(*arguments):
        where = ("--memory", str(tmp_path / "memory"), *arguments)
        found = example.images.open_images(str(drawn))
        opened.append(script.Caches(found, _options(script, tmp_path, *where)))
        return opened[-1]

    yield opened_with
    for one in opened:
        one.close()


def test_the_next_resolution_is_cached_in_the_background(caches):
    """Each image is decoded once per resolution, before the phase of this resolution begins."""
    every = caches()
    first, _ = every.begin(12, 14)
    for _ in first.dataset(10):
        pass
    assert first.stats().source_reads == TRAIN
    second, test = every.begin(14, None)
    assert [cache.stats().source_reads for cache in (second, test)] == [TRAIN, TEST]
    for _ in second.dataset(10):
        pass
    stats = second.stats()
    assert (stats.source_reads, stats.memory_hits, stats.memory_misses) == (TRAIN, TRAIN, 0)


def test_without_a_cache_nothing_is_filled(caches):
    every = caches("--without", "cache")
    every.begin(12, 14)
    second, _ = every.begin(14, None)
    # The first image is read for its shape and dtype.
    assert second.stats().source_reads == 1
    for _ in range(2):
        for _ in second.dataset(10):
            pass
    assert second.stats().source_reads == 1 + 2 * TRAIN


def test_background_errors_of_the_next_resolution_are_reported(caches, monkeypatch):
    every = caches()

    def fail(self, progress):
        raise datacache.SourceError(f"no more images of {len(self)}, {progress}")

    monkeypatch.setattr(datacache.Cache, "warm", fail)
    every.begin(12, 14)
    with pytest.raises(datacache.SourceError, match=f"no more images of {TRAIN}, False"):
        every.begin(14, None)
    every.begin(14, None)
