"""Pages as a browser shows them: curves are drawn, controls do what they say, nothing fails. `make test-browser`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs playwright: make test-browser")

from playwright.sync_api import Page

from cputrain.cli import main
from cputrain.report.page import write_report
from tests.support.browser import opened
from tests.support.run_folders import BEGUN, RECIPE, write_run

EVIL = "</script><img src=x onerror=document.title='owned'>"
INK = """name => {
  const canvas = document.querySelector(`#chart-${name} canvas`);
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const data = copy.getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let i = 0; i < data.length; i += 4) {
    const [r, g, b, a] = data.slice(i, i + 4);
    if (a > 200 && Math.max(r, g, b) - Math.min(r, g, b) > 60) count++;
  }
  return count;
}"""
CONTRAST = """() => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!color.endsWith(", 0)") && color !== "transparent") return color;
    }
    return "rgb(255, 255, 255)";
  };
  const worst = [99, ""];
  for (const node of document.querySelectorAll("main *")) {
    if (node.closest("svg, .tip, noscript") || !node.checkVisibility()) continue;
    const own = [...node.childNodes].filter((child) => child.nodeType === 3);
    const text = own.map((child) => child.data).join("").trim();
    if (!text) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < worst[0]) [worst[0], worst[1]] = [ratio, text.slice(0, 60)];
  }
  return worst;
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("runs") / "demo"))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps") / "rates"
    for i in range(4):
        recipe = f"{RECIPE}schedule: {{peak_rate: 0.{i + 1}}}\n"
        write_run(folder / f"run{i}", ranks=2, steps=20, seed=i, recipe=recipe, usage=False)
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


@pytest.fixture
def page(report: Path) -> Iterator[Page]:
    with opened(report) as (page, messages, _):
        yield page
        assert messages == [], "an error, a message or a request to another address"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1360), ("dark", 1360), ("light", 420), ("dark", 420)])
def test_every_curve_is_drawn_and_every_text_can_be_read(report: Path, scheme: str, width: int) -> None:
    with opened(report, width=width, scheme=scheme) as (page, messages, _):
        for name in ("loss", "accuracy", "rate", "throughput", "parts", "cpu", "memory", "network"):
            assert page.evaluate(INK, name) > 100, name
        assert page.locator("canvas.heat").count() == 2
        ratio, text = page.evaluate(CONTRAST)
        assert ratio >= 4.5, f"{text!r} has a contrast of {ratio:.1f}"
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page runs out of its window"
        assert messages == []


def point(page: Page, selector: str, part: float = 0.6, down: float = 0.5) -> None:
    page.locator(selector).scroll_into_view_if_needed()
    box = page.locator(selector).bounding_box()
    assert box
    page.mouse.move(box["x"] + part * box["width"], box["y"] + down * box["height"])


def test_hovering_tells_the_values_at_a_step(page: Page) -> None:
    point(page, "#chart-loss .u-over")
    tip = page.locator("#chart-loss .tip")
    assert tip.is_visible() and "step 144 · epoch 3.6" in tip.inner_text()
    assert all(label in tip.inner_text() for label in ("rank 0, each step", "training", "validation"))
    point(page, "#heat-ranks canvas", 0.95)
    assert "rank 2 · step" in page.locator("#heat-ranks .tip").inner_text() and not tip.is_visible()


def test_dragging_zooms_all_curves_and_a_button_shows_all_again(page: Page) -> None:
    def left_end(chart: str) -> int:
        page.mouse.move(0, 0)
        point(page, f"#chart-{chart} .u-over", 0.01)
        return int(page.locator(f"#chart-{chart} .tip p").inner_text().split()[1])

    assert left_end("loss") < 10 and left_end("rate") < 10
    page.locator("#chart-loss").scroll_into_view_if_needed()
    box = page.locator("#chart-loss .u-over").bounding_box()
    assert box
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 50, steps=4)
    page.mouse.up()
    assert 60 <= left_end("loss") <= 90 and 60 <= left_end("rate") <= 90, "where the drag began"
    page.click("[name=reset]")
    assert left_end("loss") < 10 and left_end("rate") < 10


@pytest.mark.parametrize("name", ["log-x", "log-y"])
def test_axes_change(page: Page, name: str) -> None:
    before = page.evaluate("document.querySelector('#chart-loss canvas').toDataURL()")
    page.check(f"[name={name}]")
    page.check("[name=axis][value=time]")
    page.wait_for_timeout(100)
    assert page.evaluate("document.querySelector('#chart-loss canvas').toDataURL()") != before
    assert page.evaluate(INK, "loss") > 100


def test_smoothing_and_the_legend_change_the_curves(page: Page) -> None:
    before = page.evaluate(INK, "throughput")
    page.locator("[name=smoothing]").fill("0.95")
    page.wait_for_timeout(100)
    smoothed = page.evaluate(INK, "throughput")
    assert smoothed != before
    page.get_by_role("button", name="each step").last.click()
    page.wait_for_timeout(100)
    assert page.evaluate(INK, "throughput") < smoothed
    assert page.locator("#chart-throughput .legend [aria-pressed=false]").count() == 1


def test_the_theme_can_be_changed_and_paper_is_white(page: Page) -> None:
    page.click("[name=theme]")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 22)"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.emulate_media(media="print")
    assert not page.locator(".tools").first.is_visible()
    keys = page.locator(".legend i, .key i, .swatch, .scale i")
    styles = keys.evaluate_all("all => all.map((each) => getComputedStyle(each).printColorAdjust)")
    assert len(styles) > 10 and set(styles) == {"exact"}, "a color that is not printed names no curve"
    assert page.locator("h2").first.evaluate("each => getComputedStyle(each).breakAfter") == "avoid"
    assert page.locator(".scroll").first.evaluate("each => getComputedStyle(each).overflowX") == "visible"


def test_a_comparison_filters_sorts_and_hides_runs(comparison: Path) -> None:
    with opened(comparison) as (page, messages, _):
        every = page.evaluate(INK, "top1")
        page.locator("[name=run]").nth(1).uncheck()
        page.wait_for_timeout(100)
        assert page.evaluate(INK, "top1") < every
        page.fill("[name=filter]", "peak_rate=0.4")
        assert page.locator("tr[data-run]:visible").count() == 1
        page.fill("[name=filter]", "")
        page.get_by_role("button", name="max accuracy %").click()
        cells = page.locator("tr[data-run] td:nth-child(5)").all_inner_texts()
        assert cells == sorted(cells, key=float)
        page.uncheck("[name=every-run]")
        page.wait_for_timeout(100)
        assert page.evaluate(INK, "top1") == 0 and messages == []


def test_hostile_names_run_nothing(tmp_path: Path) -> None:
    layer = {"layer": EVIL, "weights": 1.0, "gradients": 1.0, "ratio": 1.0, "trust": 0.5}
    more = [
        {"event": "ratios", "time": BEGUN + 999, "step": 240, "rate": 1.0, "layers": [layer]},
        {"event": "warning", "time": BEGUN + 999, "what": EVIL, "images": [EVIL]},
    ]
    run = write_run(tmp_path / "run<i>", events=more, end=False)
    with opened(write_report(run)) as (page, messages, _):
        point(page, "#heat-trust canvas", down=0.2)
        page.wait_for_timeout(200)
        assert EVIL in page.locator("#heat-trust .tip").inner_text()
        assert page.title() == "run<i>" and page.locator("img").count() == 0 and messages == []


def test_without_scripts_the_curves_are_told_in_words(report: Path) -> None:
    with opened(report, scripts=False) as (page, _, _):
        assert "240 values, first" in page.locator("#chart-loss noscript").inner_text()
        assert page.get_by_text("76.13 %").first.is_visible()
