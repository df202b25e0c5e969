"""README's Python runs as it stands."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_runs(block, capsys):
    exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    if "grid()" in block:
        assert printed.strip() in README
