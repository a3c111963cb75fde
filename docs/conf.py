"""The documentation site: `make docs` writes it to build/docs.

Its source folder is the repository, so pages stay where they are (docs/, benchmarks/results/, CONTRIBUTING.md), and a
link that works in the repository works on the site. The modules in docs/_ext make the additions to the pages, one idea
per file.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

project = "Sordino"
author = "the authors of Sordino"
copyright = "the authors of Sordino, MIT licence"  # Sphinx reads this name
version = release = (HERE.parent / "python" / "sordino" / "VERSION").read_text().strip()

extensions = [
    *("myst_parser", "sphinx_copybutton", "sphinx.ext.autodoc", "sphinx.ext.napoleon"),
    *(
        "_ext.algorithms",
        "_ext.anchors",
        "_ext.command_line",
        "_ext.home",
        "_ext.mathml",
        "_ext.on_the_site",
        "_ext.results",
        "_ext.skip_map",
        "_ext.unresolved",
    ),
]
include_patterns = ["docs/**", "benchmarks/*.md", "benchmarks/*/*.md", "benchmarks/results/gpu/*.md", "*.md"]
exclude_patterns = [".*", "build", "csrc", "python", "tests", "examples", "tools", "cmake", "dist", "docs/_*"]
root_doc = "README"
default_role = "literal"  # docstrings have names between single backquotes
nitpicky = True
smartquotes = False
# Types of other packages, whose inventories are not here, and of modules that have no page.
nitpick_ignore_regex = [
    ("py:.*", r"(collections|contextlib|functools|numpy|os|pathlib|torch|types|typing)\..*"),
    ("py:.*", r"sordino\.(_core|files|runtime)\..*|sordino\.(algorithms|checkpoint|plan|torch)\.\w+\.\w+"),
    ("py:class", r"sordino\.codecs\.(Codec|FlatCodec|PowerSGD)|sordino\.sim\.Result|Helpers|Options|Runtime|Service"),
]
autodoc_member_order = "groupwise"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Sordino {release}"
html_math_renderer = "mathml"
html_copy_source = html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}

# In `make docs-links` a host that does not answer in time is a warning, and an answer with an error code is an error.
linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_anchors = False  # docs/_ext/links.py checks the anchors of our own pages
