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


def test_origin_says_how_rates_were_chosen(results, tmp_path, monkeypatch):
    """Schedules that share a name are labelled by their rules, in tables of rates and others."""
    result = json.loads((RESULTS / "digits" / "result.json").read_text())
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    (tmp_path / "mine").mkdir()

    def shown(**more):
        (tmp_path / "mine" / "result.json").write_text(json.dumps(result | more))
        return results.table("mine")

    assert "every rule at DP's learning rate, optimizer.lr=0.1</sub>" in shown()
    config = result["provenance"]["config"]
    own = config["own"] = {"cdp_v1": {"optimizer": {"lr": 0.05}}}
    assert "each rule with the optimizer that the command gives it</sub>" in shown()
    own["cdp_v1"] = {"clip": 1.0}
    assert "every rule at DP's learning rate, optimizer.lr=0.1</sub>" in shown()
    config["tune"] = {"rates": [1, 2], "epochs": 3, "seed": 7}
    rates = [{"rule": "dp", "lr": lr, "accuracy": 1, "best": lr == 0.2} for lr in (0.1, 0.2)]
    for row in result["metrics"]:
        row |= {"lr": 0.2, "schedule": "DP"}
    page = shown(tuning=rates)
    tried = "the best of 2 learning rates, tried for 3 epochs with seed 7, the highest for DP (dp)"
    assert f"each rule at {tried}</sub>" in page
    lines = [line.split("|")[1:3] for line in page.splitlines()[:5] if "DP (" in line]
    found = [[cell.strip() for cell in line] for line in lines]
    assert found == [["DP (dp)", "0.2"], ["DP (cdp_v1)", "0.2"], ["DP (cdp_v2)", "0.2"]]


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
    assert provenance["command"].startswith(("python experiments/", "python -m tests."))
