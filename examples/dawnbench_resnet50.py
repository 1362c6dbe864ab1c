r"""Trains ResNet-50 in phases of increasing image size, as in CommLib, section 5.6.

horovodrun -np 128 -H node1:8,...,node16:8 python examples/dawnbench_resnet50.py \
  --data /local/imagenet --out /nfs/runs/1 --precision mixed_float16
python -m tfposeidon lab --nodes 2 --per-node 2 --inter 200mbit -- \
  python examples/dawnbench_resnet50.py --preset tiny --out /tmp/tiny

The tiny preset trains in the same way on synthetic images. An interrupted run resumes when it is
started again.
"""

import argparse
import json
import sys
import textwrap
import threading
from concurrent import futures
from pathlib import Path

import keras
from data import draw_shapes
from dawnbench import forecast, images, recipes, records, resnet

import keras_callbacks
import tfposeidon as tp
from tfposeidon.exchange import replicas


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            textwrap.fill(f"{name}: {recipe}.") for name, recipe in recipes.RECIPES.items()
        ),
    )
    parser.add_argument(
        "--preset",
        choices=recipes.RECIPES,
        default="paper",
        help="paper: ResNet-50, 28 epochs: 13 at 96 pixels, 11 at 128, 3 at 224 and 1 at 288, "
        "with batches of 256, 256, 256 and 128 on each rank; tiny: a small ResNet, 18 epochs at 24 "
        "to 46 pixels (paper)",
    )
    parser.add_argument(
        "--schedule",
        choices=recipes.SCHEDULES,
        default="paper",
        help="schemes of the phases; paper: top 1 %% in the first and 2D torus in the others, "
        "both with fp16 compression (paper)",
    )
    parser.add_argument(
        "--data",
        help="folder with train/<class>/*.jpeg and validation/<class>/*.jpeg (or val/, or test/), "
        "or with TFRecord files train-* and validation-*, or tfds:NAME[@FOLDER] for "
        "tensorflow-datasets, such as tfds:imagenet2012@/data/tfds; the tiny preset creates "
        "synthetic images in OUT/shapes",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for snapshots, records and plot, shared by all ranks"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print steps, plans, memory and predicted time on V100s, without training",
    )
    parser.add_argument(
        "--variables",
        action="store_true",
        help="print a line for each variable of the dry run's plans",
    )
    parser.add_argument("--nodes", type=int, default=16, help="nodes of a dry run (16)")
    parser.add_argument("--per-node", type=int, default=8, help="ranks per node of a dry run (8)")
    parser.add_argument(
        "--network", default="25gbit", help="rate between nodes of a dry run (25gbit)"
    )
    parser.add_argument("--memory", default="auto", help="folder of the shared-memory cache")
    parser.add_argument("--disk", type=Path, help="folder on a local disk for copies of the files")
    parser.add_argument(
        "--precision",
        default="float32",
        choices=["float32", "mixed_float16", "mixed_bfloat16"],
        help="dtype policy; use mixed_float16 on GPUs (float32)",
    )
    parser.add_argument(
        "--snapshot-steps", type=int, help="steps between snapshots within epochs (none)"
    )
    parser.add_argument(
        "--without",
        nargs="*",
        default=[],
        choices=["cache", "resizing", "sparse", "lars"],
        help="parts to omit, to measure their effect; without cache, each epoch reads and decodes "
        "each image; without resizing, all phases train at the largest resolution; without "
        "sparse, the first phase uses the scheme of the others; without lars, SGD trains (none)",
    )
    parser.add_argument(
        "--shortest",
        action="store_true",
        help="train one epoch per phase, on few images if they are synthetic, as a quick test",
    )
    parser.add_argument("--tensorboard", type=Path, help="folder for TensorBoard (none)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and crops (0)")
    options = parser.parse_args(arguments)
    if options.out is None and not options.dry_run:
        parser.error("--out is required: the folder for snapshots, records and plot")
    if options.variables and not options.dry_run:
        parser.error("--variables requires --dry-run")
    if options.dry_run and options.preset != "paper":
        parser.error("--dry-run requires --preset paper, whose times on V100s are known")
    return options


def keep_recipe(options):
    """Saves the recipe next to the snapshots, or compares it with the saved one."""
    names = ("preset", "schedule", "shortest", "data", "precision", "seed")
    # Another number of ranks would change the global batch.
    own = {name: getattr(options, name) for name in names} | {"ranks": tp.size()}
    own["without"] = sorted(set(options.without))
    path = options.out / "recipe.json"
    if tp.rank() == 0 and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(own))
        part.replace(path)
    tp.barrier()
    kept = json.loads(path.read_text())
    if kept != own:
        different = [
            f"{name}={own[name]} instead of {kept.get(name)}"
            for name in own
            if own[name] != kept.get(name)
        ]
        raise SystemExit(
            f"--out must be the folder of the same run. Received: {options.out}, with "
            f"{', '.join(different)}. Use another folder, or remove it"
        )


def images_of(options):
    """Returns the training and test images; the tiny preset creates them."""
    if options.data is not None:
        return images.open_images(options.data)
    if options.preset != "tiny":
        raise SystemExit(
            "--data is required; see --help. Only --preset tiny creates its own images"
        )
    if tp.rank() == 0:
        counts = {"train": 160, "test": 80} if options.shortest else {}
        draw_shapes.draw(options.out / "shapes", **counts)
    tp.barrier()
    return images.open_images(str(options.out / "shapes"))


class Caches:
    """Caches of training and test images; those of the next phase are filled in the background."""

    def __init__(self, found, options):
        self._found, self._options = found, options
        self._open, self._warming = {}, None

    def begin(self, size, next_size):
        """Returns the caches of one resolution, and starts to fill those of the next."""
        self._end_warming()
        # Earlier resolutions are not needed again. Their samples stay in memory for another run.
        for old in [one for one in self._open if one not in (size, next_size)]:
            self._close(old)
        for wanted in filter(None, (size, next_size)):
            self._open_all(wanted)
        if next_size not in (None, size) and "cache" not in self._options.without:
            self._warming = futures.Future()
            # A daemon thread: Python would wait for an executor's threads if training failed.
            what = (self._open[next_size], self._warming)
            threading.Thread(target=_warm, args=what, daemon=True).start()
        return self._open[size]

    def _open_all(self, size):
        if size not in self._open:
            where = {"memory": self._options.memory, "disk": self._options.disk, "budget": "40%"}
            if "cache" in self._options.without:
                where = {"memory": None}
            self._open[size] = [
                images.cache_of(source, self._found.pair, size, **where)
                for source in (self._found.train, self._found.test)
            ]

    def _end_warming(self):
        """Waits until the next caches are filled, and raises the error if that failed."""
        warming, self._warming = self._warming, None
        if warming is not None:
            warming.result()

    def _close(self, size):
        for cache in self._open.pop(size):
            cache.close()

    def close(self):
        """Ends threads and closes all caches, whose samples stay in memory for another run."""
        self._end_warming()
        for size in list(self._open):
            self._close(size)


def _warm(caches, warmed):
    """Fills caches one after the other; sets the result or the error of the future `warmed`."""
    try:
        for cache in caches:
            cache.warm(progress=False)
    except Exception as error:  # noqa: BLE001 - `_end_warming` raises it
        warmed.set_exception(error)
    else:
        warmed.set_result(None)


def compiled(recipe, classes, options):
    """Returns the model with its optimizer, loss and accuracy."""
    keras.config.set_dtype_policy(options.precision)
    keras.utils.set_random_seed(options.seed)
    model = resnet.resnet(classes=classes, **recipe.model)
    rate, momentum = recipe.rate_at(0.0, tp.size()), recipe.momentum
    if "lars" in options.without:
        optimizer = keras.optimizers.SGD(rate, momentum, weight_decay=recipe.weight_decay)
        # Exclude the variables that LARS excludes, too.
        optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    else:
        optimizer = tp.optimizers.LARS(rate, momentum, weight_decay=recipe.weight_decay)
    model.compile(
        optimizer=tp.DistributedOptimizer(optimizer, scheme=recipe.phases[0].scheme),
        loss=keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=recipe.smoothing
        ),
        metrics=[keras.metrics.TopKCategoricalAccuracy(recipe.top, name="accuracy")],
    )
    return model


def train(model, recipe, caches, classes, options):
    """Trains all remaining phases, and returns the records of the whole run."""
    size = tp.size()
    resize = keras_callbacks.ProgressiveResize(
        recipe.phases, learning_rate=lambda epoch: recipe.rate_at(epoch, size)
    )
    checkpoint = keras_callbacks.Checkpoint(
        options.out / "snapshots", every_n_steps=options.snapshot_steps
    )
    kept = records.Records(options.out / "records.jsonl", resize, "val_accuracy", recipe.target)
    epoch = checkpoint.epoch_to_resume()
    kept.resume(epoch)
    left = resize.remaining(epoch)
    for phase, following in zip(left, [*left[1:], None], strict=True):
        cache, test = caches.begin(phase.size, following and following.size)
        batch = phase.batch * size
        data, batches = images.training_batches(cache, phase.size, batch, classes, options.seed)
        callbacks = [
            keras_callbacks.CachePosition(cache, data),
            keras_callbacks.Throughput(),
            resize,
            kept,
            *tensorboard(options),
            checkpoint,
        ]
        model.fit(
            batches,
            validation_data=images.test_batches(test, phase.size, batch, classes),
            initial_epoch=phase.first_epoch,
            epochs=phase.end_epoch,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
    return kept


def tensorboard(options):
    """Returns a list that contains a TensorBoard callback on rank 0, if the option is set."""
    if options.tensorboard is None or tp.rank() != 0:
        return []
    return [keras.callbacks.TensorBoard(options.tensorboard, write_graph=False)]


def recipe_of(options):
    """Returns the recipe that the options select."""
    return recipes.recipe(options.preset, options.schedule, options.shortest, options.without)


def run(options):
    """Trains the remaining phases of a run, and returns the model and all records."""
    tp.init()
    recipe = recipe_of(options)
    keep_recipe(options)
    found = images_of(options)
    model = compiled(recipe, found.classes, options)
    caches = Caches(found, options)
    kept = train(model, recipe, caches, found.classes, options)
    # Do not close after an error: closing waits for the other ranks, which wait for this rank.
    caches.close()
    return model, kept


def main():
    options = parse_arguments()
    if options.dry_run:
        recipe = recipe_of(options)
        model = resnet.resnet(classes=1000, **recipe.model)
        cluster = (options.nodes, options.per_node, options.network)
        forecast.show(recipe, model, *cluster, images.kept_side, options.variables)
        return 0
    model, kept = run(options)
    if tp.rank() == 0:
        report(model, kept, options)
    return 0 if kept.reached else 1


def report(model, kept, options):
    """Prints the plan and the time to the target, and draws the plot."""
    print(f"\n{tp.unwrap(model.optimizer).plan}\n")
    reached, last = kept.reached, kept.lines[-1]
    checksum = replicas.checksum(model.trainable_variables)
    print(f"accuracy after all epochs: {100 * last[kept.metric]:.2f} %, weights {checksum}")
    if reached:
        print(
            f"time to {100 * kept.target:g} %: {reached['seconds']:.1f} s of training, "
            f"{reached['epoch'] + 1} epochs; evaluation is excluded" + kept.interruptions(reached)
        )
    else:
        print(f"{100 * kept.target:g} % was not reached in {last['seconds']:.1f} s of training")
    records.plot(kept, options.out / "accuracy.png")


if __name__ == "__main__":
    sys.exit(main())
