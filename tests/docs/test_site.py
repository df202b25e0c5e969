"""The site in a browser: BROWSER=1 python -m pytest tests/docs

With NOTEBOOKS=1 notebooks are executed, else their pages have no outputs.
"""

import os
import shutil
from importlib.util import find_spec

import pytest

from tests.site import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
MISSING = [
    name
    for name in ("playwright", "sphinx", "furo", "myst_nb")
    if find_spec(name) is None
]
RESULTS = sorted(ROOT.glob("experiments/results/*.md"))
SHOWN = [
    "index.html",
    "docs/explorer.html",
    "docs/from_scratch.html",
    "docs/three_d_parallelism.html",
    "experiments/README.html",
    *(f"experiments/results/{page.stem}.html" for page in RESULTS),
    "conf/README.html",
    "notebooks/1_schedules.html",
    "docs/python/schedule.html",
]
OUTSIDE = "() => document.documentElement.scrollWidth - window.innerWidth"


def in_browser(test):
    """Skip ``test`` without BROWSER=1, or without what a browser needs."""
    missing = bool(MISSING) or CHROMIUM is None
    test = pytest.mark.skipif(missing, reason=f"no Chromium, or no {MISSING}")(test)
    test = pytest.mark.skipif("BROWSER" not in os.environ, reason="BROWSER=1 runs it")(
        test
    )
    return pytest.mark.browser(test)


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield found
        found.close()


@pytest.mark.skipif(
    not {"BROWSER", "NOTEBOOKS"} & set(os.environ),
    reason="takes a minute: BROWSER=1 or NOTEBOOKS=1",
)
def test_is_built_without_warnings(site):
    assert site.succeeded, site.messages


@in_browser
@pytest.mark.parametrize("wide", [390, 800, 1280])
def test_pages_fit_and_load_nothing_from_elsewhere(browser, site, wide):
    page, problems = browser.new_page(viewport={"width": wide, "height": 900}), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.on("requestfailed", lambda request: problems.append(request.url))
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    for name in SHOWN:
        page.goto((site.pages / name).as_uri())
        assert page.locator("h1").count() == 1
        assert page.evaluate(OUTSIDE) <= 0, name
        for image in page.locator("img").all():
            assert image.get_attribute("alt"), name
            assert image.evaluate("image => image.naturalWidth > 0"), name
    assert not problems
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    page.close()


@in_browser
@pytest.mark.parametrize("wide", [390, 800, 1280])
def test_the_explorer_plays_lights_up_and_keeps_its_state_in_the_address(
    browser, site, wide
):
    page, problems = browser.new_page(viewport={"width": wide, "height": 900}), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.goto((site.pages / "explorer.html").as_uri() + "#schedule=cdp_v1&size=8")
    verdict, arrows = page.locator(".cdp-verdict"), page.locator(".cdp-arrows path")
    page.wait_for_function("document.querySelector('.cdp-verdict').textContent")
    assert verdict.inner_text().startswith("CDP-v1 compared with DP: ")
    assert page.evaluate(OUTSIDE) <= 0
    page.locator(".cdp-op").nth(100).hover()
    assert (
        arrows.count()
        == page.locator(".cdp-op.cdp-before, .cdp-op.cdp-after").count()
        > 1
    )
    page.get_by_label("model and machine").select_option("resnet50 on ethernet_10")
    page.wait_for_function("document.querySelector('.cdp-grid').dataset.unit === 'ms'")
    assert "saved on all ranks" in verdict.inner_text()
    assert "schedule=cdp_v1" in page.url
    assert "costs=resnet50" in page.url
    page.get_by_role("button", name="play").click()
    page.wait_for_function("document.querySelector('.cdp-veil').getAttribute('x') > 0")
    assert page.locator("output").inner_text().endswith(" ms")
    tops = [pane.bounding_box()["y"] for pane in page.locator(".cdp-grid").all()]
    assert (len({*tops}) == 1) == (wide > 700)
    assert not problems
    page.close()
