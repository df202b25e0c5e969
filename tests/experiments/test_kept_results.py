"""Numbers in README and on the page of results are those of the kept results."""

import json
import re

import pytest

from tests.experiments.command import EXPERIMENTS

RESULTS = EXPERIMENTS / "results"
KEPT = sorted(path.parent.name for path in RESULTS.glob("*/result.json"))
PAGES = [EXPERIMENTS.parent / "README.md", RESULTS / "README.md"]


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    import results

    return results


@pytest.mark.parametrize("page", PAGES, ids=["readme", "results"])
def test_pages_show_the_kept_results(results, page):
    assert page in results.PAGES
    assert results.rendered(page.read_text()) == page.read_text()


def test_check_finds_a_typed_number(results, tmp_path, monkeypatch):
    page = PAGES[0]
    typed = tmp_path / "README.md"
    typed.write_text(page.read_text().replace("| DP ", "| DQ ", 1))
    monkeypatch.setattr(results, "PAGES", (typed,))
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["results.py", "--check"])
    with pytest.raises(SystemExit, match=r"README\.md differs from experiments/results"):
        results.main()
    monkeypatch.setattr("sys.argv", ["results.py"])
    results.main()
    assert typed.read_text() == page.read_text()


def test_page_has_every_result():
    page = (RESULTS / "README.md").read_text()
    assert sorted(re.findall(r"<!-- result: (\w+) -->", page)) == KEPT
    figures = {f"{path.parent.name}/{path.name}" for path in RESULTS.glob("*/*.png")}
    assert figures <= set(re.findall(r"\]\((\S+?\.png)\)", page))


def test_table_shows_a_measurement_that_differs(results):
    path = RESULTS / "communication_measured" / "result.json"
    row = json.loads(path.read_text())["metrics"][4]
    assert results.measured(row)["as counted"] == "yes"
    more = row["traffic"] + 1
    assert results.measured(row | {"traffic_measured": more})["as counted"] == "no"
    assert results.counted(row | {"traffic_formula": more})["as by formula"] == "no"


@pytest.mark.parametrize("name", KEPT)
def test_results_have_provenance(name):
    provenance = json.loads((RESULTS / name / "result.json").read_text())["provenance"]
    assert re.fullmatch("[0-9a-f]{40}", provenance["commit"])
    assert provenance["command"].startswith("python experiments/")
