"""The concept pictures: safe to embed, readable on a phone, in light and in dark, and described."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from harness import ROOT
from lesson import palette

FIGURES = ROOT / "notebooks" / "figures"
PICTURES = [*sorted(FIGURES.glob("*.svg")), ROOT / "docs" / "figures" / "one_step.svg"]
SVG = "{http://www.w3.org/2000/svg}"
SIZE = re.compile(r"font(?:-size)?\s*:[^;}]*?(\d+(?:\.\d+)?)(px|em|rem|pt|%)")
UNSAFE_TAGS = {"script", "image", "foreignObject", "iframe", "a"}
MEANINGS = {
    **{f"rank{rank}": colour for rank, colour in enumerate(palette.RANKS)},
    **{name: getattr(palette, name.upper()) for name in ("compute", "communicate", "wait")},
    **palette.MEMORY,
}


def styles(root: ElementTree.Element) -> str:
    return "\n".join(style.text or "" for style in root.iter(f"{SVG}style"))


def test_there_are_pictures() -> None:
    assert len(PICTURES) >= 10


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_described_and_small(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    for tag in ("title", "desc"):
        assert (root.findtext(f"{SVG}{tag}") or "").strip(), f"no <{tag}>"
    assert path.stat().st_size <= 16 * 1024


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_fits_a_narrow_screen(path: Path) -> None:
    """At most 600 units wide, and no text below 15 units."""
    root = ElementTree.parse(path).getroot()
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    assert (left, top) == (0, 0) and 0 < width <= 600 and height > 0
    sizes = SIZE.findall(styles(root))
    assert not any("font-size" in element.attrib for element in root.iter()), "use the style"
    assert sizes and all(unit == "px" and float(size) >= 15 for size, unit in sizes), sizes
    assert re.search(r"^\s*text \{ font: ", styles(root), re.M), "some text may have no size"
    assert not any("scale" in element.get("transform", "") for element in root.iter())


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_self_contained(path: Path) -> None:
    """It has no script and no link, and it loads no file or font from elsewhere."""
    root = ElementTree.parse(path).getroot()
    assert not {element.tag.removeprefix(SVG) for element in root.iter()} & UNSAFE_TAGS
    for element in root.iter():
        for name, value in element.attrib.items():
            assert not name.startswith("on"), f"{name} is a script"
            assert not name.endswith("href") or value.startswith("#"), value
    text = path.read_text(encoding="utf-8")
    assert "@import" not in text and "@font-face" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*['\"]?([^)]*)", text))
    assert re.findall(r"\w+://[^\"' ]*", text) == ["http://www.w3.org/2000/svg"]


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_two_colour_schemes(path: Path) -> None:
    """The panel and the text change with the scheme. A colour of the palette stays the same."""
    root = ElementTree.parse(path).getroot()
    light, found, dark = styles(root).partition("@media (prefers-color-scheme: dark)")
    assert found
    for scheme in (light, dark):
        assert re.search(r"\.panel \{ fill: #\w{6}", scheme)
        assert re.search(r"text \{[^}]*fill: #\w{6}", scheme)
    colours = re.findall(r"\.(\w+) \{ fill: (#\w{6})", styles(root))
    wrong = [(name, colour) for name, colour in colours if MEANINGS.get(name, colour) != colour]
    assert wrong == []


def test_every_picture_is_used_with_an_alternative_text() -> None:
    sources = [*ROOT.glob("notebooks/*.md"), ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    used = set(re.findall(r"!\[[^\]]+\]\((?:\S*/)?figures/(\S+?\.svg)\)", text))
    assert [path.name for path in PICTURES if path.name not in used] == []
