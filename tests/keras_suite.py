"""Runs Keras's own tests, with each optimizer that they pass to `compile` wrapped in ours.

    python -m tests.keras_suite FOLDER ...
    horovodrun -np 2 python -m tests.keras_suite FOLDER ...

A folder is one of `keras.src`, such as `trainers`. The wheel of Keras contains the tests.
`LEFT_OUT` lists the excluded tests with the reasons.
"""

import contextlib
import functools
import inspect
import sys
import types
from pathlib import Path

import keras
import pytest
from keras.src.trainers.trainer import Trainer

import tfposeidon as tp
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects

FOLDERS = ("callbacks", "models", "optimizers", "saving", "trainers")
LEFT_OUT = {
    "orbax_checkpoint_test": "orbax-checkpoint is not installed",
    "with_data_adapter_grain": "grain is not installed",
    "with_data_adapter_torch": "PyTorch is not installed",
    "adds_loss_scaling_optimizer": "checks the class of the optimizer that compile received",
    "with_tf_distribute": "our optimizers are refused under tf.distribute",
    "AdamTest::test_ema": "reads a private attribute of `model.optimizer`, which is ours",
    "test_tf_checkpointing": "saves an optimizer that is not the wrapped optimizer of the model",
    "test_scalar_weight": "counts the optimizer's variables in a file, to which ours adds one",
    "test_saved_module_paths_and_class_names": "checks the optimizer's class",
    "test_legacy_load_skips_missing_nested_containers": "the wheel does not contain its file",
}
"""Part of a test's name -> the reason why it is excluded."""
_BEYOND = "exhausts its data early: Keras warns, and several ranks raise an error"
ON_SEVERAL_RANKS = {
    "test_fit_flow_steps_per_epoch": _BEYOND,
    "val_split_steps_per_epoch": _BEYOND,
    "not_match_": _BEYOND,
    "steps_per_execution_steps_per_epoch_match_multi_epoch_eager": _BEYOND,
    "test_fit_sparse": "requires sparse updates, but sums over ranks may be dense",
}
"""Further excluded tests on several ranks."""


class WithOurs:
    """Pytest plugin that wraps optimizers."""

    def pytest_configure(self, config):
        # Define the markers and the module of Keras's `conftest.py`, which its wheel omits.
        config.addinivalue_line("markers", "requires_trainable_backend: a backend that trains")
        config.addinivalue_line("markers", "multi_device: several devices")
        sys.modules["conftest"] = types.ModuleType("conftest")
        sys.modules["conftest"].skip_if_backend = lambda name, reason: pytest.mark.skipif(
            keras.backend.backend() == name, reason=reason
        )
        compile_model = Trainer.compile
        signature = inspect.signature(compile_model)

        @functools.wraps(compile_model)
        def compile_with_ours(*args, **options):
            call = signature.bind(*args, **options)
            call.apply_defaults()
            call.arguments["optimizer"] = _wrapped(call.arguments["optimizer"])
            return compile_model(*call.args, **call.kwargs)

        Trainer.compile = compile_with_ours

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        result = yield
        if tp.size() > 1:
            # A rank whose test failed waits here, so ranks that wait in a collective of that test
            # fail, too.
            with contextlib.suppress(RuntimeError):
                exchange_objects(None, runtime.wire(), "next test")
        return result

    def pytest_collection_modifyitems(self, items):
        reasons = LEFT_OUT | (ON_SEVERAL_RANKS if tp.size() > 1 else {})
        for item in items:
            for part, reason in reasons.items():
                if part in item.nodeid:
                    item.add_marker(pytest.mark.skip(reason))


def _wrapped(optimizer):
    if optimizer is None:
        return None
    optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, tp.DistributedOptimizer | keras.optimizers.LossScaleOptimizer):
        return optimizer
    return tp.DistributedOptimizer(optimizer)


def main(*folders):
    source = Path(inspect.getfile(keras.src)).parent
    paths = [str(source / folder) for folder in folders or FOLDERS]
    options = ["-c", "/dev/null", "-p", "no:cacheprovider", "-q", "-rfs", "--tb=short"]
    # These tests train nothing, and require pandas, PyTorch and grain.
    options += [f"--ignore={source}/trainers/data_adapters"]
    options += ["--timeout", "120", "-o", "python_files=*_test.py"]
    return pytest.main([*options, *paths], plugins=[WithOurs()])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
