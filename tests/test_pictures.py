"""The pictures: in light and in dark, and the drawn map and imports are those of the files."""

import re
import sys

import pytest
from harness import ROOT, run

FIGURES = ROOT / "docs/figures"
PICTURES = sorted([*(ROOT / "notebooks/figures").glob("*.svg"), *FIGURES.glob("*.svg")])


def test_a_picture_has_two_colour_schemes():
    """The panel and the text change with the scheme."""
    for picture in PICTURES:
        text = picture.read_text(encoding="utf-8")
        light, _, dark = text.partition("@media (prefers-color-scheme: dark)")
        for scheme in (light, dark):
            assert re.search(r"\.panel \{ fill: #\w{6}", scheme), picture
            assert re.search(r"text \{[^}]*fill: #\w{6}", scheme), picture
    assert len(PICTURES) > 9


def test_the_map_and_the_imports_are_those_of_the_files(tmp_path):
    """A count of lines may differ by 5 %, so that not every change of the code needs a drawing."""
    drawn = run(sys.executable, FIGURES / "draw.py", tmp_path, cwd=tmp_path)
    assert drawn.code == 0, drawn.stderr
    for name in ("course.svg", "package.svg"):
        new, old = (folder.joinpath(name).read_text("utf-8") for folder in (tmp_path, FIGURES))
        assert re.sub(r"\d+", "", new) == re.sub(r"\d+", "", old), "python docs/figures/draw.py"
        numbers = [[int(n) for n in re.findall(r"\d+", text)] for text in (new, old)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.05), "python docs/figures/draw.py"
