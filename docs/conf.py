"""Builds the documentation: `make docs`."""

import tfposeidon

project = "tfposeidon"
copyright = "the authors of tfposeidon; Apache-2.0"
release = version = tfposeidon.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "tfposeidon"
# As Keras and optax write docstrings: single backticks are code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autoclass_content = "class"
napoleon_numpy_docstring = False
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
nitpicky = False
exclude_patterns = ["results/*.json"]
