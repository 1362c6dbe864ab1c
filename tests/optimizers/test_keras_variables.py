"""Code that accesses variables of Keras's optimizers can access those of ours, too."""

import keras
import numpy as np
import pytest

import tfposeidon as tp
from tests.helpers import models

Adam, Scaled = keras.optimizers.Adam, keras.optimizers.LossScaleOptimizer
OPTIMIZERS = {
    "plain": lambda: tp.DistributedOptimizer(Adam()),
    "scaled": lambda: Scaled(tp.DistributedOptimizer(Adam())),
    "accumulating": lambda: tp.DistributedOptimizer(Adam(), gradient_accumulation_steps=2),
    "sparse": lambda: tp.DistributedOptimizer(
        keras.optimizers.SGD(momentum=0.9), tp.schemes.TopK(min_elements=0)
    ),
    "served": lambda: tp.ShardedOptimizer(Adam()),
    "local": lambda: tp.LocalUpdates(Adam(), 2, "outer"),
}


@pytest.fixture(params=OPTIMIZERS)
def model(request):
    keras.utils.clear_session(free_memory=False)
    model = models.mlp()
    model.compile(OPTIMIZERS[request.param](), models.LOSS)
    model.fit(*models.mlp.data(8), batch_size=4, verbose=0)
    return model


def test_variables_have_paths_and_are_not_weights(model):
    variables = model.optimizer.variables
    assert all(isinstance(variable, keras.Variable) for variable in variables)
    assert len({variable.path for variable in variables}) == len(variables)
    assert not {id(v) for v in variables} & {id(v) for v in model.weights}


def test_state_trees_and_maps_contain_our_variables(model):
    # The map requires unique paths.
    assert {v.path for v in model.trainable_variables} <= set(model._get_variable_map())
    tree = model.get_state_tree("numpy_array")
    for variable in model.optimizer.variables:
        variable.assign(variable + 1)
    model.set_state_tree(tree)
    again = model.get_state_tree("numpy_array")
    keras.tree.assert_same_structure(tree, again)
    for one, other in zip(keras.tree.flatten(tree), keras.tree.flatten(again), strict=True):
        np.testing.assert_array_equal(one, other)


def test_models_load_from_files_and_continue_training(model, tmp_path):
    """Keras restores no optimizer state from .h5 files, so training continues with new state."""
    for name in ("model.keras", "model.h5"):
        model.save(tmp_path / name)
        loaded = keras.models.load_model(tmp_path / name)
        np.testing.assert_array_equal(loaded.layers[0].kernel, model.layers[0].kernel)
        loaded.fit(*models.mlp.data(8), batch_size=4, verbose=0)
    # The editor must not show parts of the wrapper: state is saved once, as that of the inner
    # optimizer.
    editor = keras.saving.KerasFileEditor(str(tmp_path / "model.keras"))
    assert set(editor.weights_dict["layers"]) == {layer.name for layer in model.layers}
