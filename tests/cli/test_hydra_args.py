import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from toolkit.cli.hydra_args import flags_first, quoted, unquoted


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a=1", "a=1"),
        ("seed=0,1 -m epochs=1", "-m seed=0,1 epochs=1"),
        ("a=1 --multirun", "--multirun a=1"),
        ("a=1 --config-dir=mine b=2", "--config-dir=mine a=1 b=2"),
        ("a=1 --config-dir mine b=2 -cd other", "--config-dir mine -cd other a=1 b=2"),
        ("a=1 --cfg job ~b", "--cfg job a=1 ~b"),
        ("a=1 --info all", "--info all a=1"),
        ("--info a=1", "--info a=1"),
        ("", ""),
    ],
)
def test_flags_may_stand_anywhere(given, expected):
    assert flags_first(given.split()) == expected.split()


@pytest.mark.parametrize(
    "text", ["/a/b", "/a=b,(c)/[d]{e}~#ü", "it's", "a\\", "a\\'b", "x y", "", "'q'", '"q"']
)
def test_what_is_quoted_is_read_as_it_is(text):
    assert unquoted(quoted(text)) == text
    read = OverridesParser.create().parse_override(f"resume={quoted(text)}").value()
    assert str(read) == text


def test_other_values_are_no_quotes():
    assert [*map(unquoted, ["a", "'a", "'a'b", "a'"])] == ["a", "'a", "'a'b", "a'"]
