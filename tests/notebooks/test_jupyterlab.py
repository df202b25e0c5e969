"""The explorer in JupyterLab, by mouse and keyboard: BROWSER=1 python -m pytest tests/notebooks

Screenshots go to the folder SCREENSHOTS, if there is one.
"""

import os
import shutil
from pathlib import Path

import pytest

from tests.notebooks import browser

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
WAIT = 30_000
OPS = "n => document.querySelector('.cdp-grid').querySelectorAll('title').length SIGN n"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif("BROWSER" not in os.environ, reason="BROWSER=1 runs it"),
    pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "nothing is missing"),
]


class Explorer:
    """The explorer on a page, as a reader meets it."""

    def __init__(self, page):
        self.page = page
        self.grids = page.locator(".cdp-explorer .cdp-grid")

    def handle(self, name):
        slider = self.page.locator(".cdp-explorer .widget-slider").filter(has_text=name)
        return slider.locator(".noUi-handle").first

    def titles(self):
        return [grid.get_attribute("aria-label") for grid in self.grids.all()]

    def ops(self, k=0):
        return self.grids.nth(k).locator("title").count()

    def number(self, name):
        row = self.page.locator(".cdp-numbers").first.get_by_role("row").filter(has_text=name)
        return row.locator(".cdp-number").inner_text()

    def wait_for_ops(self, n):
        self.page.wait_for_function(OPS.replace("SIGN", "==="), arg=n, timeout=WAIT)


def test_the_explorer_in_jupyterlab(tmp_path):
    pictures = Path(os.environ.get("SCREENSHOTS") or tmp_path / "screenshots")
    pictures.mkdir(parents=True, exist_ok=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "notebooks").mkdir()
    shutil.copy(NOTEBOOKS / "1_schedules.ipynb", tmp_path / "notebooks")
    with (
        browser.lab(tmp_path / "notebooks", tmp_path / "home") as address,
        browser.page(address, "1_schedules.ipynb", pictures) as (page, errors),
    ):
        browser.run_all(page)
        page.wait_for_selector(".cdp-explorer .cdp-grid", timeout=WAIT)
        page.locator(".cdp-explorer").scroll_into_view_if_needed()
        explorer = Explorer(page)
        assert explorer.titles() == [
            "CDP-v2: ops of 3 training steps",
            "DP: ops of 3 training steps",
        ]
        assert (explorer.ops(), explorer.number("peak activations")) == (96, "2.5")

        _drag(page, explorer.handle("stages"), 120)
        page.wait_for_function(OPS.replace("SIGN", ">"), arg=96, timeout=WAIT)

        schedule = page.locator(".cdp-column").first.get_by_label("schedule", exact=True)
        _choose(page, schedule, "ArrowDown", 3)
        page.wait_for_selector('.cdp-grid[aria-label^="GPipe"]', timeout=WAIT)
        assert explorer.number("largest staleness") == "0"
        _choose(page, schedule, "ArrowUp", 3)
        page.wait_for_selector('.cdp-grid[aria-label^="CDP-v2"]', timeout=WAIT)

        for name in ("stages", "micro-batches"):
            explorer.handle(name).press("Home")
            explorer.handle(name).press("ArrowRight")
        explorer.wait_for_ops(3 * 2 * 2 * 2)
        page.screenshot(path=pictures / "explorer_2.png")
        for name in ("stages", "micro-batches"):
            explorer.handle(name).press("End")
        explorer.wait_for_ops(3 * 2 * 16 * 16)
        page.screenshot(path=pictures / "explorer_16.png")

        page.locator(".cdp-column").first.get_by_label("delay", exact=True).select_option("0")
        page.wait_for_selector('.cdp-wrong[role="alert"]', timeout=WAIT)
        assert "cannot read weights 0 steps late" in page.locator(".cdp-wrong p").inner_text()
        assert page.locator(".cdp-faded .cdp-grid").count() == 1
        page.screenshot(path=pictures / "explorer_wrong.png")
        assert "Traceback" not in page.locator(".jp-NotebookPanel").inner_text()
        assert not [error for error in errors if "cdp-" in error or "widget" in error.lower()]


def _drag(page, handle, pixels):
    box = handle.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + pixels, y, steps=8)
    page.mouse.up()


def _choose(page, dropdown, key, times):
    """By keyboard; while a list is closed, up and down are JupyterLab's own."""
    dropdown.focus()
    for pressed in ("Space", *[key] * times, "Enter"):
        page.keyboard.press(pressed)
        page.wait_for_timeout(100)
