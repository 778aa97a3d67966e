"""Sphinx's settings. The reference pages are written from the code before the sources are read."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from site_pages import write_pages  # noqa: E402  found once the path is set

from cputrain import __version__  # noqa: E402

project = "cputrain"
version = release = __version__
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "cputrain"
exclude_patterns = ["_build", "site_pages"]
myst_heading_anchors = 3
nitpicky = True

write_pages(HERE)
