"""JupyterLab in headless Chromium: a server on a copy of the notebooks, and a page on one of them.

The server uses a free port and its own folder for settings and kernels, none of the user's.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.ports import free_port

TOKEN = "toolkit"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
_START = 60  # seconds
_QUIET = {  # no questions, no news, nothing from the network
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
}


def missing() -> str:
    """What is not installed, or nothing."""
    for module in ("playwright", "jupyterlab"):
        if find_spec(module) is None:
            return f"{module} is not installed"
    return "" if CHROMIUM else "there is no Chromium"


@contextmanager
def lab(folder: Path, home: Path) -> Iterator[str]:
    """A JupyterLab server on ``folder``; its address."""
    port = free_port()
    settings = home / "lab" / "user-settings"
    for plugin, values in _QUIET.items():
        package, _, name = plugin.partition(":")
        path = settings / package / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    environment = os.environ | {
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "lab" / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--ServerApp.port={port}", f"--IdentityProvider.token={TOKEN}"]
    command += [f"--ServerApp.root_dir={folder}", "--ServerApp.port_retries=0"]
    command += ["--LabApp.expose_app_in_browser=True"]
    with (home / "lab.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(f"{address}/api?token={TOKEN}", server, home / "lab.log")
            yield address
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + _START
    while time.monotonic() < end and server.poll() is None:
        try:
            urlopen(url, timeout=5).close()
            return
        except (URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab does not answer: {log.read_text()[-2000:]}")


@contextmanager
def page(
    address: str, notebook: str, pictures: Path, width: int = 1280, height: int = 900
) -> Iterator:
    """A page of ``notebook``, and the console's errors; if all fails, a picture of it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            shown = browser.new_page(viewport={"width": width, "height": height})
            errors: list[str] = []
            shown.on("pageerror", lambda error: errors.append(str(error)))
            shown.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
            shown.goto(f"{address}/lab/tree/{notebook}?token={TOKEN}")
            try:
                shown.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=60_000)
                yield shown, errors
            except BaseException:
                shown.screenshot(path=pictures / "failed.png")
                raise
        finally:
            browser.close()


_READY = """
() => {
    const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
    return session?.isReady && session.session?.kernel?.status === "idle";
}
"""


def run_all(shown) -> None:
    """Run every cell by the menu, once the kernel is there."""
    shown.wait_for_function(_READY, timeout=60_000)
    shown.get_by_role("menuitem", name="Run", exact=True).click()
    shown.get_by_role("menuitem", name="Run All Cells", exact=True).click()
