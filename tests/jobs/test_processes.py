"""Importing starts nothing, patches apply in the first statement, and files require only Keras."""

import os
import subprocess
import sys

import keras

import tfposeidon as tp
from tests.helpers import models
from tests.launch import ROOT
from tests.test_optimizer import trained


def test_inner_optimizer_loads_without_tfposeidon(tmp_path):
    model = trained(tp.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    model.compile(optimizer=model.optimizer.inner_optimizer, loss=models.LOSS)
    model.save(tmp_path / "model.keras")
    script = (
        "import sys, keras; model = keras.saving.load_model(sys.argv[1]); "
        "assert 'tfposeidon' not in sys.modules; print(int(model.optimizer.iterations))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "model.keras")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.stdout.strip() == "4", done.stderr


def test_importing_starts_nothing():
    script = (
        "import sys, tfposeidon, keras_callbacks, horovod.tensorflow as hvd; "
        "assert not hvd.is_initialized(); import threading; print(len(threading.enumerate()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "1", done.stderr


ONE_LINE = """
import keras, numpy as np, tfposeidon as tp
keras.config.set_dtype_policy("mixed_float16")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(optimizer=tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
model.train_on_batch(np.zeros((2, 4), "float32"), np.zeros((2, 1), "float32"))
print(hasattr(type(model.optimizer).apply, "_tfposeidon"), hasattr(model.train_step, "_tfposeidon"))
model.fit(np.zeros((8, 4), "float32"), np.zeros((8, 1), "float32"), batch_size=4, epochs=2)
"""


def test_patches_apply_within_the_first_statement():
    """Python looks up `model.compile` before it creates the optimizer, which is the argument.

    The output of `fit` into a pipe has no control characters.
    """
    done = subprocess.run(
        [sys.executable, "-c", ONE_LINE], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    first, *lines = done.stdout.splitlines()
    assert first == "True True", done.stderr
    assert [line.split(" - ")[0] for line in lines] == ["Epoch 1/2", "2/2", "Epoch 2/2", "2/2"], (
        done.stderr
    )
    assert not any(character in done.stdout for character in "\b\r\x1b")
