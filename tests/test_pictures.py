"""The concept pictures: safe to embed, readable on a phone, in light and in dark, and described."""

import re
import sys
from xml.etree import ElementTree

import pytest
from harness import ROOT, run
from lesson import palette

PICTURES = sorted((ROOT / "notebooks/figures").glob("*.svg"))
assert len(PICTURES) > 9
FIGURES = ROOT / "docs/figures"
PICTURES += sorted(FIGURES.glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
SIZE = re.compile(r"font(?:-size)?\s*:[^;}]*?(\d+(?:\.\d+)?)(px|em|rem|pt|%)")
UNSAFE_TAGS = {"script", "image", "foreignObject", "iframe", "a"}
MEANINGS = {
    **{f"rank{rank}": colour for rank, colour in enumerate(palette.RANKS)},
    **{name: getattr(palette, name.upper()) for name in ("compute", "communicate", "wait")},
    **palette.MEMORY,
}


@pytest.fixture(params=PICTURES, ids=lambda path: path.stem)
def picture(request):
    """Return a picture's text, its elements, of which the first is the root, and its style."""
    text = request.param.read_text(encoding="utf-8")
    elements = [*ElementTree.fromstring(text).iter()]
    style = "\n".join(element.text for element in elements if element.tag == f"{SVG}style")
    return text, elements, style


def test_a_picture_is_described_small_and_self_contained(picture):
    """It has no script and no link, and it loads no file or font from elsewhere."""
    text, elements, _ = picture
    assert len(text.encode()) <= 16 * 1024
    for tag in ("title", "desc"):
        assert (elements[0].findtext(f"{SVG}{tag}") or "").strip(), f"no <{tag}>"
    assert not {element.tag.removeprefix(SVG) for element in elements} & UNSAFE_TAGS
    for name, value in (item for element in elements for item in element.attrib.items()):
        assert not name.startswith("on"), f"{name} is a script"
        assert not name.endswith("href") or value.startswith("#"), value
    assert "@import" not in text and "@font-face" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*['\"]?([^)]*)", text))
    assert re.findall(r"\w+://[^\"' ]*", text) == ["http://www.w3.org/2000/svg"]


def test_a_picture_fits_a_narrow_screen(picture):
    """At most 600 units wide, and no text below 15 units."""
    _, elements, style = picture
    left, top, width, height = map(float, elements[0].attrib["viewBox"].split())
    assert (left, top) == (0, 0) and 0 < width <= 600 and height > 0
    sizes = SIZE.findall(style)
    assert not any("font-size" in element.attrib for element in elements), "use the style"
    assert sizes and all(unit == "px" and float(size) >= 15 for size, unit in sizes), sizes
    assert re.search(r"^\s*text \{ font: ", style, re.M), "some text may have no size"
    assert not any("scale" in element.get("transform", "") for element in elements)


def test_a_picture_has_two_colour_schemes(picture):
    """The panel and the text change with the scheme. A colour of the palette stays the same."""
    *_, style = picture
    light, found, dark = style.partition("@media (prefers-color-scheme: dark)")
    assert found
    for scheme in (light, dark):
        assert re.search(r"\.panel \{ fill: #\w{6}", scheme)
        assert re.search(r"text \{[^}]*fill: #\w{6}", scheme)
    colours = re.findall(r"\.(\w+) \{ fill: (#\w{6})", style)
    assert [(name, c) for name, c in colours if MEANINGS.get(name, c) != c] == []


def test_the_map_and_the_imports_are_those_of_the_files(tmp_path):
    """A count of lines may differ by 5 %, so that not every change of the code needs a drawing."""
    drawn = run(sys.executable, FIGURES / "draw.py", tmp_path, cwd=tmp_path)
    assert drawn.code == 0, drawn.stderr
    for name in ("course.svg", "package.svg"):
        new, old = (folder.joinpath(name).read_text("utf-8") for folder in (tmp_path, FIGURES))
        assert re.sub(r"\d+", "", new) == re.sub(r"\d+", "", old), "python docs/figures/draw.py"
        numbers = [[int(n) for n in re.findall(r"\d+", text)] for text in (new, old)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.05), "python docs/figures/draw.py"
