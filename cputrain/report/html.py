"""The frame of a page: template, style and program in one file that loads nothing and runs nothing else."""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from affinity.terminal_text import printable_lines
from cputrain import __version__

PROGRAM = ("data.js", "chart.js", "heat.js", "page.js")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """The style and the program of every page; `script_hash` is the only script that the browser may run."""

    style: str
    script: str

    @property
    def script_hash(self) -> str:
        """The program's hash as a Content-Security-Policy has it."""
        return f"sha256-{base64.b64encode(hashlib.sha256(self.script.encode()).digest()).decode()}"


@cache
def read_assets() -> Assets:
    """The package's own files and uPlot, as one style and one script."""
    root = files("cputrain.report")
    program = "".join(root.joinpath("assets", name).read_text(encoding="utf-8") for name in PROGRAM)
    uplot = root.joinpath("vendor", "uplot")
    vendored = uplot.joinpath("uPlot.iife.min.js").read_text(encoding="utf-8")
    return Assets(
        style=uplot.joinpath("uPlot.min.css").read_text(encoding="utf-8")
        + root.joinpath("assets", "page.css").read_text(encoding="utf-8"),
        script=f'{vendored}\n(() => {{\n"use strict";\n{program}}})();\n',
    )


def render(template: str, *, title: str, data: Mapping[str, object], **values: Any) -> str:
    """A page. Texts in `values` are escaped by the template, those in `data` so that they cannot end its element."""
    environment = Environment(
        loader=PackageLoader("cputrain.report"),
        undefined=StrictUndefined,
        autoescape=True,
        finalize=lambda value: printable_lines(value) if type(value) is str else value,  # Markup is our own
        trim_blocks=False,
    )
    return environment.get_template(template).render(
        title=title,
        data=json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        assets=read_assets(),
        version=__version__,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        **values,
    )
