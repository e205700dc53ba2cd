"""The site in a real browser: no error on the console, no missing image, nothing cut or white."""

import re
from itertools import groupby
from urllib.parse import quote

import pytest
from docutils.nodes import make_id
from harness import ROOT, public_names
from test_troubleshooting import HEADINGS

import ddp_ref

pytestmark = pytest.mark.site
TROUBLESHOOTING = "docs/troubleshooting.html"
# Common words: of these, the page need only be among the first five results.
AMONG_FIVE = {"did not arrive", "appears not to match sizes", "to unfreeze layers"}
# Pixels of a phone, of half a screen and of a laptop. A change of the scheme or the width is slow.
LOOKS = {400: ["light", "dark"], 1000: ["dark", "light"], 1400: ["light", "dark"]}


def test_all_notebooks_and_pages_are_there(site):
    sources = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb"), ROOT / "README.md"]
    sources += [*ROOT.glob("scripts/*.py"), ROOT / "datautils.py"]
    assert {str(source.relative_to(ROOT).with_suffix(".html")) for source in sources} <= {*site[0]}


def test_every_page_loads_whole_and_looks_right(site, browser):
    pages, address, _ = site
    page, wrong, found = browser.new_page(), [], []
    page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda request: wrong.extend(failure(request)))
    made = {"index.html", "search.html", "genindex.html", "scripts/multigpu_spawn.html"}
    for name in sorted(written(pages) | made):  # conf.py makes all pages of code alike
        page.goto(f"{address}/{name}", wait_until="load")
        for width, schemes in LOOKS.items():
            page.set_viewport_size({"width": width, "height": 900})
            for scheme in schemes:
                page.emulate_media(color_scheme=scheme)
                wrong += page.evaluate(LOOK)
                found += [f"{name}, {scheme}, {width} pixels: {text}" for text in wrong]
                wrong.clear()
    assert found == []


def test_the_front_page_leads_to_everything(site, browser):
    pages, address, _ = site
    page = browser.new_page()
    page.goto(f"{address}/index.html")
    links = page.locator(".landing a").evaluate_all("links => links.map(a => a.href)")
    assert {f"{address}/{name}" for name in written(pages)} == set(links)
    page.get_by_placeholder("paste an error message").fill("Duplicate GPU detected")
    page.get_by_role("button", name="Search").click()
    page.locator("#search-results .search a").first.click()
    assert page.url.startswith(f"{address}/{TROUBLESHOOTING}")


def test_the_search_finds_each_message(site, browser):
    """Its heading comes first, unless it is in AMONG_FIVE."""
    page, wrong = browser.new_page(), {}
    headings = {re.findall("`(.+?)`", h)[0]: make_id(h) for h in HEADINGS if h.startswith("`")}
    assert len(headings) > 40
    for message, heading in headings.items():
        page.goto(f"{site[1]}/search.html?q={quote(message)}")
        page.locator(".search-summary", has_text="Search finished").wait_for()
        links = page.locator("#search-results .search a")
        found = links.evaluate_all("links => links.map(link => link.getAttribute('href'))")
        places = [link.split("?")[0] for link in found[:5]]
        is_first = places[:1] == [f"{TROUBLESHOOTING}#{heading}"]
        if not is_first and not (message in AMONG_FIVE and TROUBLESHOOTING in places):
            wrong[message] = places
    assert wrong == {}


def written(pages):
    """Return the pages that are text. Others are code, or made by Sphinx."""
    sources = [(name, (ROOT / name).with_suffix) for name in pages]
    return {name for name, source in sources if source(".md").exists() or source(".ipynb").exists()}


def failure(request):
    """Return what failed: nothing, if the next page only cut the request off."""
    return [] if "ERR_ABORTED" in request.failure else [f"{request.failure}: {request.url}"]


LOOK = r"""async () => {
  const root = document.documentElement, found = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const start = (element) => element.textContent.trim().slice(0, 40);
  all("details").forEach((details) => (details.open = true));
  for (const image of document.images) {
    image.loading = "eager";
    await image.decode().catch(() => found.push("missing image: " + image.src.slice(0, 80)));
    if (!image.alt) found.push("image without a text: " + image.src.slice(0, 80));
    if (dark && image.src.endsWith(".png") && getComputedStyle(image).filter === "none")
      found.push("white image: " + image.src);
  }
  if (root.scrollWidth > root.clientWidth)
    found.push(`wider than the screen: ${root.scrollWidth} pixels of ${root.clientWidth}`);
  for (const pre of all("article pre")) {
    const fits = pre.textContent.split("\n").every((line) => line.length <= 100);
    const isCut = [pre, pre.parentElement].some((box) => box.scrollWidth > box.clientWidth);
    if (root.clientWidth >= 1000 && fits && isCut) found.push("cut: " + start(pre));
    if (getComputedStyle(pre).fontSize !== "13px") found.push("another size: " + start(pre));
    const colored = [...pre.querySelectorAll(".gd, .gi, [style*=background]")];
    const widths = new Set(colored.map((line) => line.getBoundingClientRect().width));
    if (widths.size > 1) found.push("a diff with ragged colors: " + start(pre));
  }
  for (const name of all("td .pre, th .pre"))
    if (name.getClientRects().length > 1) found.push("broken name: " + start(name));
  const isWhite = (color) => color.match(/\d+/g).slice(0, 3).every((part) => part > 150);
  for (const box of dark ? all("article :is(div, details, figure, img, pre, table)") : []) {
    const style = getComputedStyle(box);
    if (style.borderRightWidth !== "0px" && isWhite(style.borderRightColor))
      found.push("white border: " + box.outerHTML.slice(0, 80));
    if (isWhite(style.backgroundColor)) found.push("white box: " + box.outerHTML.slice(0, 80));
  }
  return found;
}"""


def test_the_reference_names_every_export_file_by_file():
    text = (ROOT / "docs" / "reference.md").read_text()
    named = re.findall(r"^\.\. auto\w+:: ddp_ref\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(public_names())
    files = [file for file, _ in groupby(getattr(ddp_ref, name).__module__ for name in named)]
    assert len(files) == len({*files})
