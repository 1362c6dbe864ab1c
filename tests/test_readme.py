"""Tests the example and the links of the README."""

import re

import keras
import numpy as np

from tests.launch import ROOT


def test_the_example_runs(monkeypatch):
    difference = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[
        1
    ].splitlines()
    code = "\n".join(line[2:] for line in difference if not line.startswith("-"))
    assert sum(line.startswith("+") for line in difference) == 3
    images = np.random.default_rng(0).integers(0, 255, (64, 28, 28), dtype=np.uint8)
    digits = np.random.default_rng(1).integers(0, 10, 64, dtype=np.uint8)
    # Replace the download by images with the shapes and dtypes of MNIST.
    monkeypatch.setattr(
        keras.datasets.mnist, "load_data", lambda: ((images, digits), (images, digits))
    )
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert "Plan for 1 rank(s)" in str(names["optimizer"].plan)


def test_troubleshooting_quotes_messages_of_the_code():
    packages = ("tfposeidon", "datacache", "keras_callbacks")
    files = [ROOT / "setup.py", *(path for p in packages for path in (ROOT / p).rglob("*.py"))]
    # Join adjacent literals.
    code = re.sub(r'"\s*\n\s*f?"', "", "".join(path.read_text() for path in files))
    code = code.replace("{job.unit}", "rank").replace("{source}", "TF_CONFIG")
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = set(re.findall(r"\*\*`+ ?(.+?) ?`+\*\*", page))
    messages.remove("'LossScaleOptimizer' object has no attribute 'plan'")  # Keras raises it.
    parts = [
        part for m in messages for part in re.split(r"\.\.\.|\. Received|\[1\]|\b[\dN.]+\b", m)
    ]
    assert [part for part in parts if part.strip() not in code] == []


def test_linked_documents_exist():
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: no {target}"
        for path in re.findall(
            r"\b(?:tests|benchmarks|examples)/[\w/]+\.\w+", document.read_text()
        ):
            assert (ROOT / path).exists(), f"{document.name}: no {path}"
