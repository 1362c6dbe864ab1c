"""Parts of the DAWNBench example: images in all formats, crops, rates, and what is refused."""

import json
import re
from collections import Counter
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.linear_model import RidgeClassifier

import datacache
import keras_callbacks
import tfposeidon as tp
from tests.launch import ROOT

tfds = pytest.importorskip("tensorflow_datasets")
TRAIN, TEST, SIZE = 30, 20, 16
CONV, NORM = keras.layers.Conv2D, keras.layers.BatchNormalization


@pytest.fixture(scope="module")
def example():
    """The example's modules, which lie beside its script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        from data import draw_shapes
        from dawnbench import images, recipes, records, resnet

        yield SimpleNamespace(
            draw_shapes=draw_shapes, images=images, recipes=recipes, records=records, resnet=resnet
        )


@pytest.fixture(scope="module")
def script(example):
    """The script itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        import dawnbench_resnet50

        yield dawnbench_resnet50


@pytest.fixture(scope="module")
def drawn(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "shapes"
    example.draw_shapes.draw(folder, train=TRAIN, test=TEST, size=SIZE)
    return folder


def _files(folder, part):
    """Returns the files of a part with their classes, in the order of the folder."""
    files = sorted((folder / part).glob("*/*.jpg"))
    names = sorted({file.parent.name for file in files})
    return [(file.read_bytes(), names.index(file.parent.name)) for file in files]


def _as_records(folder, target):
    """Writes images as the usual scripts for ImageNet do, with classes from 1."""
    for part, name in (("train", "train"), ("test", "validation")):
        with tf.io.TFRecordWriter(str(target / f"{name}-00000-of-00001")) as writer:
            for encoded, label in _files(folder, part):
                features = {
                    "image/encoded": tf.train.Feature(
                        bytes_list=tf.train.BytesList(value=[encoded])
                    ),
                    "image/class/label": tf.train.Feature(
                        int64_list=tf.train.Int64List(value=[label + 1])
                    ),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
    return str(target)


def _as_tfds(folder, target):
    class DrawnShapes(tfds.core.GeneratorBasedBuilder):
        """Images of a folder."""

        VERSION = tfds.core.Version("1.0.0")
        # Looking for it, 4.9.10 needs importlib_resources, which it does not ask for.
        code_path = None

        def _info(self):
            features = {
                "image": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, manager):
            del manager
            return {part: self._generate_examples(part) for part in ("train", "test")}

        def _generate_examples(self, part):
            names = sorted(path.name for path in (folder / part).iterdir())
            for number, file in enumerate(sorted((folder / part).glob("*/*.jpg"))):
                yield number, {"image": str(file), "label": names.index(file.parent.name)}

    tfds.disable_progress_bar()
    DrawnShapes(data_dir=target).download_and_prepare()
    return f"tfds:drawn_shapes@{target}"


def _samples(images, found, source):
    """Returns classes and pixels of a source, as the cache keeps them for crops of 14 pixels."""
    cache = images.cache_of(source, found.pair, 14, memory=None)
    (pixels, labels) = next(iter(cache.dataset(len(source), shuffle=False)))
    cache.close()
    return sorted(
        (int(label), image.numpy().tobytes()) for image, label in zip(pixels, labels, strict=True)
    )


@pytest.mark.parametrize("form", [lambda folder, target: str(folder), _as_records, _as_tfds])
def test_images_in_all_formats_are_the_same(example, drawn, tmp_path, form):
    images = example.images
    found = images.open_images(form(drawn, tmp_path))
    for part, source in (("train", found.train), ("test", found.test)):
        expected = []
        for encoded, label in _files(drawn, part):
            image, _ = images.decoded(14, lambda *pair: pair, tf.constant(encoded), label)
            expected.append((label, image.numpy().tobytes()))
        assert _samples(images, found, source) == sorted(expected)
        assert isinstance(source.name(0), str)


def test_folders_with_other_classes_are_refused(example, drawn, tmp_path):
    images = example.images
    (tmp_path / "train").symlink_to(drawn / "train")
    file = tmp_path / "val" / "circle-stripes" / "1.jpg"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    with pytest.raises(SystemExit, match="must have the same classes"):
        images.open_images(str(tmp_path))
    with pytest.raises(SystemExit, match=r"--data must be a folder with train/<class>"):
        images.open_images(str(tmp_path / "none"))


def test_images_that_are_labelled_are_tested_on(example, drawn, tmp_path):
    """ImageNet's `test` has no labels, so that it is the last choice."""
    images = example.images
    for name in ("train", "validation", "val", "test"):
        (tmp_path / name).symlink_to(drawn / "test")
    for name in ("validation", "val", "test"):
        assert f"{tmp_path.name}/{name}/" in images.open_images(str(tmp_path)).test.name(0)
        (tmp_path / name).unlink()


def test_records_beside_a_folder_are_refused(example, drawn, tmp_path):
    images = example.images
    _as_records(drawn, tmp_path)
    (tmp_path / "validation-00000-of-00001").unlink()
    (tmp_path / "val").symlink_to(drawn / "test")
    with pytest.raises(SystemExit, match="--data must be a folder with train/<class>"):
        images.open_images(str(tmp_path))


@pytest.mark.parametrize("label", [0, 1001])
def test_classes_that_imagenet_has_not_are_refused(example, label):
    images = example.images
    features = {"image/encoded": tf.constant(b""), "image/class/label": tf.constant(label, "int64")}
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be from 1 to 1000"):
        images._pair_of_record(features)
    features["image/class/label"] = tf.constant(1000, "int64")
    assert int(images._pair_of_record(features)[1]) == 999


def test_crops_are_drawn_by_what_is_in_the_batch(example, drawn, tmp_path):
    """Another order of samples has other crops, the same one the same."""
    images = example.images
    found = images.open_images(str(drawn))
    cache = images.cache_of(found.train, found.pair, 12, memory=tmp_path / "memory")

    def epochs():
        _, data = images.training_batches(cache, 12, 10, found.classes, seed=1)
        return [np.concatenate([batch.numpy() for batch, _ in data]) for _ in range(2)]

    first, second = epochs()
    assert first.shape == (TRAIN, 12, 12, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(epochs()[0], first)
    assert (first != second).any()
    cache.close()


@pytest.mark.slow
def test_shape_and_texture_are_not_linear(example):
    """A linear model of the pixels stays below 60 % of what must be told apart."""
    draw_shapes = example.draw_shapes
    rng = np.random.default_rng(0)
    labels = np.arange(1600) % len(draw_shapes.CLASSES)
    pixels = np.stack([draw_shapes.image(label, SIZE, rng).reshape(-1) for label in labels]) / 255
    linear = RidgeClassifier(alpha=100.0).fit(pixels[:1200], labels[:1200])
    assert linear.score(pixels[1200:], labels[1200:]) < 0.6


def test_rates_follow_batches_and_epochs(example):
    recipes = example.recipes
    recipe = recipes.recipe("paper", "paper")
    assert recipe.epochs == 28
    assert recipe.rate_at(0.0, 128) == 0.0
    assert recipe.rate_at(5.0, 128) == 29.0
    assert recipe.rate_at(5.0, 64) == 14.5
    assert recipe.rate_at(28.0, 128) == 0.0
    assert recipe.phases[0].scheme.name == "hitopk"
    assert {phase.scheme.name for phase in recipe.phases[1:]} == {"2dtar"}


def test_phases_are_those_of_the_paper(example):
    """Section 5.6 and table 4 of CommLib."""
    recipe = example.recipes.recipe("paper", "paper")
    assert [(phase.epochs, phase.size, phase.batch) for phase in recipe.phases] == [
        (13, 96, 256),
        (11, 128, 256),
        (3, 224, 256),
        (1, 288, 128),
    ]
    first, *others = [phase.scheme for phase in recipe.phases]
    assert first == tp.schemes.HierarchicalTopK(density=0.01, wire_dtype="float16")
    assert others == [tp.schemes.Torus2D(wire_dtype="float16")] * 3
    assert (recipe.top, recipe.target) == (5, 0.93)


@pytest.mark.slow
def test_the_model_of_the_paper_is_resnet_50_v1_5(example):
    """Its number of values; strides in the 3 x 3 convolutions; blocks that begin as identities."""
    recipe = example.recipes.recipe("paper", "paper")
    model = example.resnet.resnet(classes=1000, **recipe.model)
    values = [
        sum(np.prod(variable.shape) for variable in variables)
        for variables in (model.trainable_variables, model.variables)
    ]
    assert values == [25_557_032, 25_610_152]
    kinds = {kind: [one for one in model.layers if isinstance(one, kind)] for kind in (CONV, NORM)}
    strided = Counter(one.kernel_size for one in kinds[CONV] if one.strides == (2, 2))
    # The stem, the first block of three stages, and the projections beside these blocks.
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
        ("sparse", {"schemes": ["2dtar"] * 4}),
        ("lars", {"peak": 12.8}),
        ("resizing", {"sizes": [288] * 4}),
        ("cache", {}),
    ],
)
def test_parts_that_are_left_out(script, tmp_path, without, differs):
    """Each changes one thing."""

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
def test_without_lars_sgd_trains(script, tmp_path, without):
    tp.init()
    options = _options(script, tmp_path, *(["--without", *without] if without else []))
    optimizer = script.compiled(script.recipe_of(options), 10, options).optimizer.inner_optimizer
    assert type(optimizer) is (keras.optimizers.SGD if without else tp.optimizers.LARS)


@pytest.fixture
def records_of(example, tmp_path, monkeypatch):
    """Function from an epoch to the records of a run that goes on there; it has a false clock."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(example.records.time, "perf_counter", lambda: clock.now_s)
    tp.init()
    phases = [
        keras_callbacks.Phase(epochs=2, size=12, batch=4),
        keras_callbacks.Phase(epochs=1, size=14, batch=2),
    ]
    resize = keras_callbacks.ProgressiveResize(phases, learning_rate=0.1)

    def begin(epoch):
        path = tmp_path / "records.jsonl"
        kept = example.records.Records(path, resize, "val_accuracy", target=0.9)
        kept.set_model(SimpleNamespace(optimizer=SimpleNamespace(policy="2dtar")))
        kept.resume(epoch)
        return kept

    def train(kept, epoch, accuracy, trained_s, evaluated_s):
        kept.on_epoch_begin(epoch)
        clock.now_s += trained_s
        kept.on_test_begin()
        clock.now_s += evaluated_s
        kept.on_test_end()
        kept.on_epoch_end(epoch, {"val_accuracy": accuracy, "loss": 1.0})

    def wait(seconds):
        clock.now_s += seconds

    return SimpleNamespace(begin=begin, train=train, wait=wait)


def test_time_is_that_of_training(records_of, capsys):
    """What lies between epochs counts, evaluation does not, nor what was before the first epoch."""
    kept = records_of.begin(0)
    records_of.wait(50)
    records_of.train(kept, 0, accuracy=0.5, trained_s=10, evaluated_s=100)
    records_of.wait(3)
    records_of.train(kept, 1, accuracy=0.92, trained_s=10, evaluated_s=100)
    records_of.train(kept, 2, accuracy=0.95, trained_s=20, evaluated_s=100)
    assert [line["seconds"] for line in kept.lines] == [10, 23, 43]
    assert [(line["pixels"], line["batch"]) for line in kept.lines] == [(12, 4), (12, 4), (14, 2)]
    assert kept.reached["epoch"] == 1
    assert kept.interruptions(kept.reached) == ""
    told = capsys.readouterr().out.splitlines()
    assert ["is reached" in line for line in told] == [False, True, False]
    assert [json.loads(line) for line in kept.path.read_text().splitlines()] == kept.lines


def test_time_goes_on_after_an_interruption(records_of):
    kept = records_of.begin(0)
    assert kept.reached is None
    for epoch in range(2):
        records_of.train(kept, epoch, accuracy=0.95, trained_s=10, evaluated_s=1)
    # The snapshot is of the second epoch, which is trained again.
    records_of.wait(1000)
    again = records_of.begin(1)
    records_of.train(again, 1, accuracy=0.5, trained_s=7, evaluated_s=1)
    assert [line["seconds"] for line in again.lines] == [10, 17]
    assert [line["interrupted"] for line in again.lines] == [0, 1]
    assert "interrupted in 1 epoch(s)" in again.interruptions(again.lines[-1])
    third = records_of.begin(2)
    assert third.lines == again.lines
    records_of.train(third, 2, accuracy=0.5, trained_s=1, evaluated_s=1)
    assert [line["interrupted"] for line in third.lines] == [0, 1, 2]


@pytest.mark.slow
def test_the_plot_is_drawn(records_of, example, tmp_path):
    pytest.importorskip("matplotlib")
    kept = records_of.begin(0)
    for epoch, accuracy in enumerate((0.5, 0.95)):
        records_of.train(kept, epoch, accuracy, trained_s=10, evaluated_s=1)
    example.records.plot(kept, tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_images_that_are_drawn_are_left_alone(example, drawn):
    before = sorted((drawn / "train").glob("*/*"))
    example.draw_shapes.draw(drawn, train=5, test=5, size=SIZE)
    assert sorted((drawn / "train").glob("*/*")) == before
    assert len(datacache.from_folder(drawn / "train")) == TRAIN


@pytest.mark.slow
@pytest.mark.parametrize("variables", [[], ["--variables"]])
def test_dry_run(script, monkeypatch, capsys, variables):
    """It tells time, plan and memory, and leaves nothing behind."""
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
    assert schemes[1:] == ["2dtar(wire_dtype=float16)"] * 3
    # 25,610,152 values, of which 25,557,032 have a gradient and a velocity.
    assert any("306.90 MB per rank" in line for line in lines)
    # A plan for each of both schedules of schemes, and none where it is not asked for.
    assert sum(line.startswith("Plan for 128 rank(s)") for line in lines) == 2 * len(variables)


def test_variables_are_of_a_dry_run(script):
    with pytest.raises(SystemExit):
        script.parse_arguments(["--variables", "--out", "x"])


def _options(script, out, *arguments):
    return script.parse_arguments(["--preset", "tiny", "--out", str(out), *arguments])


def test_what_a_folder_was_made_with_is_kept(script, tmp_path, monkeypatch):
    """The same run goes on, whatever the order of its options; another is refused by name."""
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
    """Function from options to the caches of the drawn images; they are closed after the test."""
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


def test_the_next_resolution_is_filled_meanwhile(caches):
    """Each image is decoded once for each resolution, before its phase begins."""
    every = caches()
    first, _ = every.begin(12, 14)
    for _ in first.dataset(10):
        pass
    second, test = every.begin(14, None)
    assert [cache.stats().source_reads for cache in (second, test)] == [TRAIN, TEST]
    for _ in second.dataset(10):
        pass
    stats = second.stats()
    assert (stats.source_reads, stats.memory_hits, stats.memory_misses) == (TRAIN, TRAIN, 0)
    assert first.stats().source_reads == TRAIN


def test_without_cache_nothing_is_filled(caches):
    every = caches("--without", "cache")
    every.begin(12, 14)
    second, _ = every.begin(14, None)
    # The first image, for shapes and types.
    assert second.stats().source_reads == 1
    for _ in range(2):
        for _ in second.dataset(10):
            pass
    assert second.stats().source_reads == 1 + 2 * TRAIN


def test_what_fails_while_the_next_resolution_is_filled_is_told(caches, monkeypatch):
    every = caches()

    def fail(self, progress):
        raise datacache.SourceError(f"no more images of {len(self)}, {progress}")

    monkeypatch.setattr(datacache.Cache, "warm", fail)
    every.begin(12, 14)
    with pytest.raises(datacache.SourceError, match=f"no more images of {TRAIN}, False"):
        every.begin(14, None)
    every.begin(14, None)
