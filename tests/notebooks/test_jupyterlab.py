"""The explorer in JupyterLab, by mouse and keyboard: BROWSER=1 python -m pytest tests/notebooks

The server uses a free port and its own home folder. Screenshots go to the folder SCREENSHOTS, if
there is one.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.ports import free_port

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
MISSING = [name for name in ("playwright", "jupyterlab") if find_spec(name) is None]
TOKEN = "toolkit"
START, WAIT = 60, 30_000  # seconds, milliseconds
OPS = "n => document.querySelector('.cdp-grid').querySelectorAll('title').length SIGN n"
READY = """() => {
    const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
    return session?.isReady && session.session?.kernel?.status === "idle";
}"""
SETTINGS = {  # no questions, no news, nothing from the network
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosave": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif("BROWSER" not in os.environ, reason="BROWSER=1 runs it"),
    pytest.mark.skipif(
        bool(MISSING) or CHROMIUM is None, reason=f"no Chromium, or no {MISSING}"
    ),
]


@contextmanager
def lab(folder, home):
    """A JupyterLab server on ``folder``; its address."""
    for name, values in SETTINGS.items():
        path = (
            home
            / ".jupyter/lab/user-settings/@jupyterlab"
            / f"{name}.jupyterlab-settings"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    port = free_port()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--ServerApp.port={port}", f"--IdentityProvider.token={TOKEN}"]
    command += [f"--ServerApp.root_dir={folder}", "--ServerApp.port_retries=0"]
    command += ["--LabApp.expose_app_in_browser=True"]
    own = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("JUPYTER", "IPYTHON", "XDG"))
    }
    with (home / "lab.log").open("w") as log:
        environment = own | {"HOME": str(home)}
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            address, end = f"http://127.0.0.1:{port}", time.monotonic() + START
            while not answers(f"{address}/api?token={TOKEN}"):
                assert time.monotonic() < end, (home / "lab.log").read_text()[-2000:]
                assert server.poll() is None, (home / "lab.log").read_text()[-2000:]
                time.sleep(0.2)
            yield address
        finally:
            server.terminate()
            server.wait(20)


def answers(url):
    try:
        urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def page(address, notebook, pictures):
    """A page of ``notebook``, and the console's errors; if all fails, a picture of it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        shown, errors = browser.new_page(viewport={"width": 1280, "height": 900}), []
        shown.on("pageerror", lambda error: errors.append(str(error)))
        shown.on(
            "console", lambda m: errors.append(m.text) if m.type == "error" else None
        )
        try:
            shown.goto(f"{address}/lab/tree/{notebook}?token={TOKEN}")
            shown.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=60_000)
            yield shown, errors
        finally:
            shown.screenshot(path=pictures / "last.png")
            browser.close()


def test_the_explorer_in_jupyterlab(tmp_path):
    pictures = Path(os.environ.get("SCREENSHOTS") or tmp_path / "screenshots")
    for folder in (pictures, tmp_path / "home", tmp_path / "notebooks"):
        folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(NOTEBOOKS / "1_schedules.ipynb", tmp_path / "notebooks")
    with (
        lab(tmp_path / "notebooks", tmp_path / "home") as address,
        page(address, "1_schedules.ipynb", pictures) as (shown, errors),
    ):
        shown.wait_for_function(READY, timeout=60_000)
        shown.get_by_role("menuitem", name="Run", exact=True).click()
        shown.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        shown.wait_for_selector(".cdp-explorer .cdp-grid", timeout=WAIT)
        shown.locator(".cdp-explorer").scroll_into_view_if_needed()
        grids = shown.locator(".cdp-explorer .cdp-grid")

        def handle(name):
            slider = shown.locator(".cdp-explorer .widget-slider").filter(has_text=name)
            return slider.locator(".noUi-handle").first

        def number(name):
            row = (
                shown.locator(".cdp-numbers")
                .first.get_by_role("row")
                .filter(has_text=name)
            )
            return row.locator(".cdp-number").inner_text()

        assert [grid.get_attribute("aria-label") for grid in grids.all()] == [
            "CDP-v2: ops of 3 training steps",
            "DP: ops of 3 training steps",
        ]
        assert (grids.first.locator("title").count(), number("peak activations")) == (
            96,
            "2.5",
        )

        # Side by side.
        assert len({grid.bounding_box()["y"] for grid in grids.all()}) == 1
        assert (
            "CDP-v2 compared with DP"
            in shown.locator(".cdp-explorer .cdp-verdict").inner_text()
        )
        grids.first.locator(".cdp-op").nth(20).hover()
        assert grids.first.locator(".cdp-arrows path").count() > 1

        drag(shown, handle("stages"), 120)
        shown.wait_for_function(OPS.replace("SIGN", ">"), arg=96, timeout=WAIT)

        schedule = shown.locator(".cdp-column").first.get_by_label(
            "schedule", exact=True
        )
        choose(shown, schedule, "ArrowDown", 3)
        shown.wait_for_selector('.cdp-grid[aria-label^="GPipe"]', timeout=WAIT)
        assert number("largest staleness") == "0"
        choose(shown, schedule, "ArrowUp", 3)
        shown.wait_for_selector('.cdp-grid[aria-label^="CDP-v2"]', timeout=WAIT)

        for size, keys in ((2, ("Home", "ArrowRight")), (16, ("End",))):
            for name in ("stages", "micro-batches"):
                for key in keys:
                    handle(name).press(key)
            n_ops = 3 * 2 * size * size
            shown.wait_for_function(OPS.replace("SIGN", "==="), arg=n_ops, timeout=WAIT)
            shown.screenshot(path=pictures / f"explorer_{size}.png")

        width = shown.locator(".cdp-explorer").get_by_label("width", exact=True)
        width.select_option("2")
        shown.wait_for_selector('.cdp-wrong[role="alert"]', timeout=WAIT)
        sentence = shown.locator(".cdp-wrong p").first.inner_text()
        assert "width=2 shares the stages of a model" in sentence
        width.select_option("1")
        shown.wait_for_selector('.cdp-wrong[role="alert"]', state="detached")

        shown.locator(".cdp-column").first.get_by_label(
            "delay", exact=True
        ).select_option("0")
        shown.wait_for_selector('.cdp-wrong[role="alert"]', timeout=WAIT)
        assert (
            "cannot read weights 0 steps late"
            in shown.locator(".cdp-wrong p").inner_text()
        )
        assert shown.locator(".cdp-faded .cdp-grid").count() == 1
        shown.screenshot(path=pictures / "explorer_wrong.png")
        assert "Traceback" not in shown.locator(".jp-NotebookPanel").inner_text()
        assert not [
            error for error in errors if "cdp-" in error or "widget" in error.lower()
        ]


def drag(shown, handle, pixels):
    handle.scroll_into_view_if_needed()
    box = handle.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    shown.mouse.move(x, y)
    shown.mouse.down()
    shown.mouse.move(x + pixels, y, steps=8)
    shown.mouse.up()


def choose(shown, dropdown, key, times):
    """By keyboard; while a list is closed, up and down are JupyterLab's own."""
    dropdown.focus()
    for pressed in ("Space", *[key] * times, "Enter"):
        shown.keyboard.press(pressed)
        shown.wait_for_timeout(100)
