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
    assert results.rendered(page.read_text()) == page.read_text()


@pytest.mark.parametrize("page", PAGES, ids=["readme", "results"])
def test_a_typed_number_is_found_out(results, page, tmp_path, monkeypatch):
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


def test_both_pages_are_kept_up_to_date(results):
    assert list(results.PAGES) == PAGES


def test_the_page_of_results_has_them_all():
    page = (RESULTS / "README.md").read_text()
    assert sorted(re.findall(r"<!-- result: (\w+) -->", page)) == KEPT
    figures = {f"{path.parent.name}/{path.name}" for path in RESULTS.glob("*/*.png")}
    assert figures <= set(re.findall(r"\]\((\S+?\.png)\)", page))


def test_a_measurement_that_differs_is_shown(results):
    name = RESULTS / "communication_measured" / "result.json"
    row = json.loads(name.read_text())["metrics"][4]
    assert results._measured({"metrics": [row]})[0]["as counted"] == "yes"
    differs = row | {"traffic_measured": row["traffic"] + 1}
    assert results._measured({"metrics": [differs]})[0]["as counted"] == "no"
    differs = row | {"traffic_formula": row["traffic"] + 1}
    assert results._counted({"metrics": [differs]})[0]["as by formula"] == "no"


@pytest.mark.parametrize("name", KEPT)
def test_kept_results_have_their_origin(name):
    provenance = json.loads((RESULTS / name / "result.json").read_text())["provenance"]
    assert provenance["commit"]
    assert not provenance["commit"].endswith("+")
    assert provenance["command"].startswith("python experiments/")
