"""README's Python runs as it stands; links of all pages lead somewhere."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.experiments.command import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TEXTS = README + (ROOT / "experiments/README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXTS, re.DOTALL)
EXAMPLES = ROOT / "experiments/examples"
PAGES = [
    page
    for where in ("*.md", "conf/*.md", "experiments/*.md", "experiments/results/*.md")
    for page in sorted(ROOT.glob(where))
]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_runs(block, capsys):
    exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    if "grid()" in block:
        assert printed.strip() in README


def test_own_model_of_readme_trains_and_is_planned(tmp_path, monkeypatch):
    (module,) = [block for block in BLOCKS if "def mlp" in block]
    commands = re.findall(
        r"^    cyclic-dp (.* model\.target=my_net\.mlp .*)$", README, re.MULTILINE
    )
    (tmp_path / "my_net.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_net", raising=False)
    options = {"train": ("epochs=1", "tracking.mode=disabled"), "plan": ()}
    experiments = []
    for command in commands:
        experiment, *arguments = shlex.split(command)
        experiments.append(experiment)
        finished = run(experiment, *arguments, *options[experiment])
        assert finished.status == 0, finished.err
        (result,) = Path("outputs", experiment).glob("*/result.json")
        assert OmegaConf.load(result).provenance.config.model.target == "my_net.mlp"
    assert experiments == ["train", "plan"]


def test_diff_is_that_of_an_example():
    """Its own test trains by the example, and by the script for DDP."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    ddp = (EXAMPLES / "tutorial_ddp.py").read_text().replace("self.", "")
    cdp = (EXAMPLES / "tutorial_cdp.py").read_text().replace("self.", "")
    cdp = cdp.replace('os.getenv("RULE", "cdp_v2")', '"cdp_v2"')
    for line in filter(None, diff.splitlines()):
        before, after = (ddp, cdp) if line[0] == "-" else (cdp, ddp)
        assert f"{line[1:]}\n" in before
        assert f"{line[1:]}\n" not in after


def prose(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", prose(page), re.MULTILINE)
    return [
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for path, _, anchor in (link.partition("#") for link in links if "://" not in link):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchors(target).count(anchor) == 1, f"{path}#{anchor}"
