"""The page in a real browser: it runs without a complaint, asks nobody for anything, and can be used by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.coverage.browser import Browser, find_browser
from tests.coverage.documents import hostile_document, measured_document

from graphstep.capture.report import CaptureReport, RegionStats
from graphstep.coverage import html_page, write_document

PROGRAM = find_browser()

pytestmark = pytest.mark.skipif(
    # Continuous integration installs one: there it must not be missing.
    PROGRAM is None,
    reason="no browser of the Chromium family is on the path: sh scripts/set_up_browser.sh",
)

SHOWN = "Array.from(document.querySelectorAll('.tree li')).filter(each => !each.hidden).map(each => each.dataset.path)"
CONTRASTS = """(() => {
  const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = (colour, under) => {
    pen.clearRect(0, 0, 1, 1);
    if (under) { pen.fillStyle = `rgb(${under})`; pen.fillRect(0, 0, 1, 1); }
    pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
    return Array.from(pen.getImageData(0, 0, 1, 1).data.slice(0, 3));
  };
  const light = (c) => { const [r, g, b] = c.map(v => v / 255).map(
    v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (element) => element === null ? [] : [...behind(element.parentElement), element];
  const found = [];
  for (const element of document.querySelectorAll("main *, header *")) {
    const own = Array.from(element.childNodes).some(node => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.closest("noscript")) continue;
    let ground = null;
    for (const each of behind(element)) ground = rgb(getComputedStyle(each).backgroundColor, ground);
    const bar = element.parentElement.querySelector(":scope > .fill");
    if (bar) ground = rgb(getComputedStyle(bar).backgroundColor, ground);
    const [a, b] = [light(rgb(getComputedStyle(element).color, ground)), light(ground)];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.textContent.slice(0, 40)]);
  }
  return found.sort((a, b) => a[0] - b[0]);
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert PROGRAM is not None, "sh scripts/set_up_browser.sh installs one"
    with Browser(PROGRAM) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_document(measured_document({"layers.0": "layer", "layers.2": "layer"}), path)
    return path


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.prefer("light")
    browser.open(page)
    return browser


def test_it_opens_without_complaint_and_asks_for_nothing_else(opened: Browser, page: Path) -> None:
    assert opened.run("document.documentElement.dataset.ready") == "yes"
    assert opened.complaints() == []
    assert opened.requests() == [page.resolve().as_uri()]


def test_complaints_and_requests_are_seen(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "broken.html"
    path.write_text("<!DOCTYPE html><img src='none.png'><script>missing()</script>", encoding="utf-8")
    browser.open(path)
    assert any("missing is not defined" in text for text in browser.complaints())
    assert any(url.endswith("none.png") for url in browser.requests())


def test_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(html_page(hostile_document()), encoding="utf-8")
    browser.open(path)
    assert browser.run("typeof window.hit") == "undefined"
    assert browser.run("document.images.length") == 0
    assert browser.run("document.documentElement.dataset.ready") == "yes"
    assert browser.complaints() == []
    assert browser.requests() == [path.resolve().as_uri()]
    assert "</script><img" in browser.run("document.title")
    browser.run("document.querySelector('canvas').scrollIntoView()")
    x, y = browser.run(
        "(({left, top}) => [left + 2, top + 20])(document.querySelector('canvas').getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert "cudaLaunchKernel" in browser.run("document.getElementById('timeline-detail').textContent")


def test_timelines_are_drawn_and_zoomed_by_keyboard(opened: Browser) -> None:
    drawn = "Array.from(document.querySelectorAll('canvas')).map(each => Number(each.dataset.drawn))"
    before = opened.run(drawn)
    assert len(before) == 2
    assert min(before) > 20
    coloured = (
        "Array.from(document.querySelectorAll('canvas')).map(c => "
        "new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)"
    )
    assert min(opened.run(coloured)) > 2
    opened.run("document.querySelector('canvas').focus()")
    for _ in range(5):
        opened.press("+")
    assert sum(opened.run(drawn)) < sum(before) / 2
    text = "document.getElementById('timeline-range').textContent"
    zoomed = opened.run(text)
    opened.press("ArrowRight")
    assert opened.run(text) != zoomed
    opened.press("0")
    assert opened.run(drawn) == before


def test_the_tree_is_searched_and_filtered(opened: Browser) -> None:
    everything = opened.run(SHOWN)
    assert len(everything) == 13
    opened.run(
        "(e => { e.value = '1.up'; e.dispatchEvent(new Event('input')); })(document.getElementById('tree-find'))"
    )
    assert opened.run(SHOWN) == ["", "layers", "layers.1", "layers.1.up"]
    assert opened.run("document.getElementById('tree-count').textContent") == "1 of 13"
    opened.run(
        "(e => { e.value = ''; e.dispatchEvent(new Event('input')); })(document.getElementById('tree-find'));"
        "(e => { e.value = 'captured'; e.dispatchEvent(new Event('change')); })(document.getElementById('tree-show'))"
    )
    assert {"layers.0", "layers.2.down"} <= set(opened.run(SHOWN))
    assert not {"head", "layers.1"} & set(opened.run(SHOWN))
    visible = "document.querySelector('[data-path=\"layers.0.up\"]').checkVisibility()"
    assert opened.run(visible)
    opened.run("document.querySelector('[data-open=\"0\"]').click()")
    assert not opened.run(visible)


def test_branches_open_by_keyboard(opened: Browser) -> None:
    opened.run("document.querySelector('[data-path=\"layers\"] > details').open = false")
    opened.run("document.querySelector('[data-path=\"layers\"] > details > summary').focus()")
    opened.press("Enter")
    assert opened.run("document.querySelector('[data-path=\"layers\"] > details').open")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_in_light_and_dark(opened: Browser, scheme: str) -> None:
    """Contrast of at least 4.5 to 1, which WCAG 2.2 asks for (level AA)."""
    opened.prefer(scheme)
    opened.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    contrasts = opened.run(CONTRASTS)
    assert len(contrasts) > 60
    assert contrasts[0][0] >= 4.5, contrasts[:5]
    ground = opened.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


def test_the_button_overrides_the_system(opened: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = opened.run(ground)
    opened.run("document.getElementById('theme').click()")
    dark = opened.run(ground)
    assert dark != light
    assert opened.run("document.getElementById('theme').textContent") == "light"
    opened.prefer("dark")
    opened.run("document.getElementById('theme').click()")
    assert opened.run(ground) == light


def test_everything_that_acts_has_a_name(opened: Browser) -> None:
    tree = opened.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "searchbox", "combobox", "image", "heading", "link", "region")
    unnamed = [
        node["role"]["value"]
        for node in tree
        if not node["ignored"]
        and node["role"]["value"] in roles
        and not str(node.get("name", {}).get("value", "")).strip()
    ]
    assert unnamed == []
    found = [node["role"]["value"] for node in tree if not node["ignored"]]
    assert found.count("region") == 6
    assert found.count("image") >= 2


def test_without_scripts_everything_but_the_drawing_is_there(browser: Browser, page: Path) -> None:
    browser.without_scripts()
    try:
        browser.open(page)
        shown = browser.call("DOM.getDocument", depth=0)["root"]["nodeId"]
        tree = browser.call("DOM.querySelectorAll", nodeId=shown, selector=".tree li")["nodeIds"]
        hidden = browser.call("DOM.querySelectorAll", nodeId=shown, selector=".tools:not([hidden])")["nodeIds"]
    finally:
        browser.without_scripts(is_off=False)
    assert len(tree) == 13
    assert hidden == []


def test_a_deep_tree_stays_readable(browser: Browser, tmp_path: Path) -> None:
    depth = 60
    paths = [".".join([*["inner"] * level, "side"]) for level in range(depth)]
    rows = tuple(RegionStats(path, "layer", num_recordings=level % 2) for level, path in enumerate(paths))
    path = tmp_path / "deep.html"
    CaptureReport("tape", rows, 0).write_html(path)
    browser.open(path)
    shown = "Array.from(document.querySelectorAll('.module')).filter(each => each.checkVisibility())"
    assert browser.run(f"{shown}.length") > depth
    assert browser.run(f"Math.min(...{shown}.map(each => each.clientWidth))") > 150
    assert browser.run("document.documentElement.scrollWidth") <= 1100


def test_a_narrow_screen_scrolls_in_one_direction_only(opened: Browser) -> None:
    metrics = {"height": 800, "deviceScaleFactor": 1, "mobile": False}
    opened.call("Emulation.setDeviceMetricsOverride", width=360, **metrics)
    try:
        assert opened.run("document.documentElement.scrollWidth") <= 360
    finally:
        opened.call("Emulation.setDeviceMetricsOverride", width=1100, **metrics)
