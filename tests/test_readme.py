"""README's Python runs as it stands; links of all pages lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TEXTS = README + (ROOT / "experiments/README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXTS, re.DOTALL)
EXAMPLE = (ROOT / "experiments/examples/imagenet_cdp.py").read_text()
PAGES = [
    page
    for where in ("*.md", "conf/*.md", "experiments/*.md", "experiments/results/*.md")
    for page in sorted(ROOT.glob(where))
]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_runs(block, capsys):
    if "prepare(" in block:  # lines of an example that its own test runs
        example = EXAMPLE.replace('os.getenv("RULE", "cdp_v2")', '"cdp_v2"')
        code = [line.partition("  #")[0] for line in block.splitlines()]
        assert all(line in example for line in code)
        return
    exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    if "grid()" in block:
        assert printed.strip() in README


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
