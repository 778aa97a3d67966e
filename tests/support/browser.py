"""Pages in headless Chromium, as a reader sees them."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
OPENED_MS = 60_000


def chromium() -> str:
    """Return Chromium's path; skips the test if it is not installed."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.skip(reason="needs the system package chromium")
    return found


@contextmanager
def opened(
    path: Path, *, width: int = 1360, height: int = 900, scheme: str = "light", scripts: bool = True
) -> Iterator[tuple[Page, list[str], float]]:
    """Open a page; yield it, the list of its errors and messages so far, and the seconds until the visible part was
    drawn. The rest of the page is drawn by then, too."""
    messages: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, java_script_enabled=scripts
        )
        page = context.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: request.url.startswith("file:") or messages.append(request.url))
        begun = time.perf_counter()
        page.goto(path.resolve().as_uri(), timeout=OPENED_MS)
        if scripts:
            page.wait_for_selector("html[data-ready]", state="attached", timeout=OPENED_MS)
        seconds = time.perf_counter() - begun
        if scripts:
            page.wait_for_selector("html[data-complete]", state="attached", timeout=OPENED_MS)
        try:
            yield page, messages, seconds
        finally:
            browser.close()
