"""Pages that are generated from the code when the site is built; none of them is committed.

write_pages(docs) writes PAGES below docs/. A test checks that they can be written, `make docs` that Sphinx reads them.
"""

from pathlib import Path

from site_pages.architecture import modules
from site_pages.command_line import command_line
from site_pages.environment import environment
from site_pages.events import events
from site_pages.exit_status import exit_status
from site_pages.json_output import json_output
from site_pages.other_launchers import other_launchers
from site_pages.plan_json import plan_json
from site_pages.python_api import python_api
from site_pages.recipe_keys import recipe_keys
from site_pages.shipped import machines, recipes

PAGES = {
    "reference/command-line.md": command_line,
    "reference/python-api.md": python_api,
    "reference/json-output.md": json_output,
    "reference/recipe-keys.md": recipe_keys,
    "reference/other-launchers.md": other_launchers,
    "reference/recipes.md": recipes,
    "reference/machines.md": machines,
    "reference/plan-json.md": plan_json,
    "reference/events.md": events,
    "reference/environment.md": environment,
    "reference/exit-status.md": exit_status,
    "reference/modules.md": modules,
}


def write_pages(docs: Path) -> None:
    """Write every generated page below docs/; unchanged files keep their modification time, and Sphinx skips them."""
    for name, page in PAGES.items():
        path, text = docs / name, page()
        path.parent.mkdir(exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
