"""Sphinx's settings; the reference pages are written from the code before the sources are read."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from reference_pages import write_reference  # noqa: E402  found once the path is set

project = "cputrain"
extensions = ["myst_parser", "sphinx_click"]
html_theme = "furo"
html_title = "cputrain"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
# Links to files of the checkout, as GitHub resolves them.
myst_url_schemes = ("http", "https")

write_reference(HERE / "reference")
