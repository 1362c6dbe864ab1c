"""Scripts modeled on three of Horovod's examples, before and after the steps of docs/migration.md.

They are not copies, which would have to retain the notices of Horovod's license (Apache 2.0). The
originals download MNIST, and two use sessions of TensorFlow 1; these scripts read the digits that
scikit-learn installs. The scripts before migration do not run under Keras 3, which lacks names that
Horovod's callbacks use (`variable.ref()`, `keras.backend.get_value`) and an argument of `compile`.
The tests therefore read their calls, and run only the scripts after migration.
"""

import ast
import re
import runpy

import pytest

from tests.launch import ROOT
from tfposeidon.communication.wire import exchange_objects

PORTED = ROOT / "tests" / "examples" / "ported"
NAMES = ("keras_mnist", "keras_mnist_advanced", "tensorflow2_keras_mnist")


def left_column():
    """Returns the calls in the left column of the page's table for `horovod.keras`."""
    page = (ROOT / "docs" / "migration.md").read_text()
    table = page.split("## Calls of `horovod.keras`")[1].split("\n## ")[0]
    return " ".join(re.findall(r"^\| (.+?) \| ", table, re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_all_calls_of_the_script(name):
    text, column = (PORTED / "before" / f"{name}.py").read_text(), left_column()
    calls = set(re.findall(r"\bhvd[.\w]+", text))
    assert len(calls) > 4
    keywords = {
        argument.arg
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("hvd.")
        for argument in node.keywords
    }
    others = re.findall(r"experimental_\w+|set_visible_devices|verbose=1 if|\.h5", text)
    for call in {*calls, *keywords, *others}:
        assert call in column, f"docs/migration.md does not map {call}"
    assert "hvd" not in (PORTED / "after" / f"{name}.py").read_text()


@pytest.mark.ranks("2")
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
@pytest.mark.parametrize("name", NAMES)
def test_the_script_trains_equal_weights_on_all_ranks(wire, name, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(PORTED))
    monkeypatch.chdir(tmp_path)
    script = PORTED / "after" / f"{name}.py"
    history = runpy.run_path(str(script), run_name="__main__")["model"].history.history
    histories = exchange_objects(str(history), wire, "history")
    assert histories[0] == histories[1]
    assert history["loss"][-1] < 0.5 * history["loss"][0]
