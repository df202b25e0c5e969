"""Numbers in README are those of the kept results."""

import json

import pytest

from tests.experiments.command import EXPERIMENTS

KEPT = sorted(path.parent.name for path in (EXPERIMENTS / "results").glob("*/result.json"))


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    import results

    return results


def test_readme_shows_the_kept_results(results):
    readme = (EXPERIMENTS.parent / "README.md").read_text()
    assert results.rendered(readme) == readme


def test_a_typed_number_is_found_out(results):
    readme = (EXPERIMENTS.parent / "README.md").read_text()
    assert results.rendered(readme.replace("| DP ", "| DQ ", 1)) == readme


@pytest.mark.parametrize("name", KEPT)
def test_kept_results_have_their_origin(name):
    provenance = json.loads((EXPERIMENTS / "results" / name / "result.json").read_text())[
        "provenance"
    ]
    assert provenance["commit"]
    assert not provenance["commit"].endswith("+")
    assert provenance["command"].startswith("python experiments/")
