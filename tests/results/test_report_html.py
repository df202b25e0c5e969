"""The page is one file, inert, and fits a phone."""

import re
import shutil

import pytest
from matplotlib.figure import Figure as Drawing

from tests.results import folders
from toolkit.results.report import build_report
from toolkit.results.report_page import Command, Figure, Report, Table, Text, to_html
from toolkit.results.runs import read_runs

HOSTILE = "<script>alert(1)</script>\"'&"
CHROMIUM = shutil.which("chromium") or ""


def drawing(caption="c", alt="a"):
    figure = Drawing(figsize=(2, 1))
    figure.subplots().plot([1, 2], label="<b>")
    return Figure(figure, caption, alt)


def test_everything_is_escaped():
    blocks = [
        Text(HOSTILE),
        Table([{HOSTILE: HOSTILE}], HOSTILE),
        drawing(HOSTILE, HOSTILE),
        Command(HOSTILE, HOSTILE),
    ]
    page = to_html(Report(HOSTILE, {HOSTILE: blocks}), HOSTILE)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;&#34;&#39;&amp;") == 14


def test_names_of_runs_are_escaped(tmp_path):
    folder = tmp_path / "<script>alert(1)<"
    folders.train(folder, command=f"python train.py {HOSTILE}")
    folders.change(folder, schedule="<script>alert(2)<")
    page = to_html(build_report(read_runs([tmp_path]), "Runs"))
    assert "<script" not in page
    assert "&lt;script&gt;alert(2)&lt;" in page


def test_it_needs_no_other_file_and_is_the_same_every_time():
    report = Report("T", {"A": [drawing(alt="what it shows")], "B": [Text("t")]})
    page = to_html(report)
    sources = {
        source.partition(",")[0]
        for source in re.findall(r'(?:src|href)="([^"]+)', page)
    }
    assert sources == {"#section-1", "#section-2", "data:", "data:image/svg+xml;base64"}
    assert re.findall(r' id="([^"]+)"', page) == ["section-1", "section-2"]
    for part in (
        "default-src 'none'",
        'alt="what it shows"',
        "<figcaption>c</figcaption>",
    ):
        assert part in page
    assert not re.search(r"@import|url\(", page)
    assert (
        to_html(Report("T", {"A": [drawing(alt="what it shows")], "B": [Text("t")]}))
        == page
    )


def test_a_page_of_many_long_cells_is_bounded():
    table = Table([{"note": f"{k} {'x' * 10_000}"} for k in range(5000)], "Notes.")
    page = to_html(Report("Many", {"Summary": [table]}))
    assert page.count("<tr>") == 1001
    assert len(page) < 1_000_000
    assert "The first 1000 of 5000 rows" in page


def test_numbers_are_aligned():
    rows = [
        {"rule": "DP", "acc": "1.25", "d": "+1 ± 0.5"},
        {"rule": "1F1B", "acc": "-", "d": "2 %"},
    ]
    page = to_html(Report("T", {"S": [Table(rows, "c")]}))
    assert re.findall(r'<th scope="col"( class=number)?>', page) == [
        "",
        *[" class=number"] * 2,
    ]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """All that a report can hold, with names that are long."""
    path = tmp_path_factory.mktemp("runs")
    folders.compare(
        path / "c", {"dp": [0.9, 0.8], "cdp_v1": [0.7, 0.6], "cdp_v2": [0.8, 0.9]}
    )
    long = "a_name_" * 20
    folders.train(path / long, batch=8, command=f"python experiments/train.py x={long}")
    folders.measured(path / long)
    folders.job(
        path / "f", folders.config(), status={"state": "failed", "message": long}
    )
    page = to_html(build_report(read_runs([path]), f"Title {long}"), "end")
    (path / "report.html").write_text(page)
    return path / "report.html"


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed"
    )
    if not CHROMIUM:
        pytest.skip("there is no chromium")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield found
        found.close()


@pytest.mark.parametrize("size", [(390, 844), (1280, 900)], ids=str)
def test_a_browser_shows_it(browser, page_file, size):
    page = browser.new_page(viewport=dict(zip(("width", "height"), size, strict=True)))
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(page_file.as_uri())
    drawn = page.evaluate(
        "[...document.images].map(i => [i.naturalWidth, i.getBoundingClientRect().width])"
    )
    width = page.evaluate("document.scrollingElement.scrollWidth")
    links = page.evaluate(
        "[...document.querySelectorAll('nav a')].map(a => !!document.querySelector(a.hash))"
    )
    page.close()
    assert not said
    assert len(drawn) == 3  # curves, grids and a timeline
    assert all(natural > 0 and shown > 100 for natural, shown in drawn)
    assert width <= size[0]
    assert links == [True] * 5
