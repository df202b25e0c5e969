"""Numbers in README and on the pages of results are those of the kept results."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.experiments.command import EXPERIMENTS
from toolkit.cli import settings

RESULTS = EXPERIMENTS / "results"
KEPT = sorted(path.parent.name for path in RESULTS.glob("*/result.json"))
INDEX = RESULTS / "README.md"
ANSWERS = sorted({*RESULTS.glob("*.md")} - {INDEX})
PAGES = [EXPERIMENTS.parent / "README.md", INDEX, *ANSWERS]

NOW_TESTS = {"bench_checkpoint_fuzz", "bench_fuzz"}
"""Results of benches that have become tests: their commands need the commit that they name."""


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    import results

    return results


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}"
)
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
    with pytest.raises(
        SystemExit, match=r"README\.md differs from experiments/results"
    ):
        results.main()
    monkeypatch.setattr("sys.argv", ["results.py"])
    results.main()
    assert typed.read_text() == page.read_text()


def test_pages_have_every_result_once():
    pages = "".join(page.read_text() for page in ANSWERS)
    names = re.findall(r"<!-- result: (\w+) -->", pages)
    assert sorted(name for name in names if not name.endswith("_short")) == KEPT
    figures = {f"{path.parent.name}/{path.name}" for path in RESULTS.glob("*/*.png")}
    assert figures <= set(re.findall(r"\]\((\S+?\.png)\)", pages))


@pytest.mark.parametrize("page", ANSWERS, ids=lambda page: page.stem)
def test_a_page_asks_one_question_and_opens_with_its_finding(page):
    text = page.read_text()
    assert re.match(r"# [^\n]+\?\n\n\*\*[^*]+\.\*\*\n\n", text)
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    assert len(text.splitlines()) <= 350
    assert f"]({page.name})" in INDEX.read_text()


def test_the_index_has_ten_findings():
    """Each has a number, besides its own, and a link to its page."""
    findings = (
        INDEX.read_text().partition("## Ten findings\n")[2].partition("\nM is")[0]
    )
    sentences = re.split(r"^\d+\. ", findings, flags=re.MULTILINE)[1:]
    assert len(sentences) == 10
    for sentence in sentences:
        text, _, link = sentence.rpartition("](")
        assert re.search(r"\d", text)
        assert (RESULTS / link.partition(")")[0].partition("#")[0]) in ANSWERS


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
    rates = [
        {"rule": "dp", "lr": lr, "accuracy": 1, "best": lr == 0.2} for lr in (0.1, 0.2)
    ]
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
    assert provenance["command"].startswith(
        ("cyclic-dp ", "python experiments/", "python -m tests.", "torchrun ")
    )


@pytest.mark.parametrize("name", [name for name in KEPT if name not in NOW_TESTS])
def test_the_command_of_a_result_still_composes(name):
    command = json.loads((RESULTS / name / "result.json").read_text())["provenance"][
        "command"
    ]
    # On ranks: torchrun --nproc-per-node 4 -m toolkit compare ...
    command = re.sub(
        "^torchrun --nproc-per-node [0-9]+ -m toolkit ", "cyclic-dp ", command
    )
    program, script, *options = shlex.split(command)
    assert program in ("python", "cyclic-dp")
    if script == "-m":
        assert Path(*options[0].split(".")).with_suffix(".py").exists()
        return
    # Hydra composes its own options before all others.
    settings(
        Path(script).stem,
        *(option for option in options if not option.startswith("hydra.")),
    )
