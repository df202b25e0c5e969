"""The picture of README.md."""

import runpy
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from toolkit.schedule import catalog

DOCS = Path(__file__).parents[2] / "docs"
animation = runpy.run_path(str(DOCS / "animation.py"))["animation"]
SVG = "{http://www.w3.org/2000/svg}"


def test_the_kept_picture_is_that_of_the_schedules():
    command = [sys.executable, str(DOCS / "animation.py")]
    made = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert (DOCS / "schedules.svg").read_text("utf-8") == made


def test_every_op_of_the_loop_is_drawn_once_and_the_peaks_are_said():
    image = ET.fromstring(
        animation({"DP": catalog.dp(2), "CDP": catalog.cdp_v2(2)}, n_slots=8)
    )
    first, second = (image.find(f".//*[@id='schedule{k}']") for k in range(2))
    assert [x.text for x in first.iter(f"{SVG}text")] == list("01100110") * 2
    assert [x.text for x in second.iter(f"{SVG}text")] == [*"01100110", *"011001"]
    assert [*image.iter(f"{SVG}text")][-1].text.endswith("1.5 micro-batches")
