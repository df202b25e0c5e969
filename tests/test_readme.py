"""README's Python runs as it stands; links of all pages lead somewhere."""

import re
from pathlib import Path

import pytest

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
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for path, _, anchor in (link.partition("#") for link in links if "://" not in link):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchors(target).count(anchor) == 1, f"{path}#{anchor}"
