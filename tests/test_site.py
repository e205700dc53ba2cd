"""The site in a real browser: no error on the console, no missing image, nothing too wide."""

import re
from urllib.parse import quote

import pytest
from docutils.nodes import make_id
from harness import ROOT, public_names
from test_troubleshooting import HEADINGS

pytestmark = pytest.mark.site
TROUBLESHOOTING = "docs/troubleshooting.html"
# Of these, a heading of the page need not come first: it has none, or its words are common ones.
AMONG_FIVE = ["/dev/shm", "--shm-size", "marked as ready twice", "broadcast_buffers"]
AMONG_FIVE += ["did not arrive", "appears not to match sizes", "to unfreeze layers"]
SCREENS = {"wide": (1280, 900), "narrow": (390, 844)}  # pixels of a laptop and of a phone


def test_all_notebooks_and_pages_are_there(site):
    sources = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb"), ROOT / "README.md"]
    assert {str(source.relative_to(ROOT).with_suffix(".html")) for source in sources} <= {*site[0]}


@pytest.mark.parametrize(("screen", "scheme"), [("wide", "light"), ("narrow", "dark")])
def test_every_page_loads_whole(site, browser, screen, scheme):
    pages, address, _ = site
    width, height = SCREENS[screen]
    size = {"width": width, "height": height}
    page, wrong = browser.new_page(viewport=size, color_scheme=scheme), []
    page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda request: wrong.extend(failure(request)))
    found = []
    for name in pages:
        wrong.clear()
        page.goto(f"{address}/{name}", wait_until="load")
        found += [f"{name}: {text}" for text in [*wrong, *page.evaluate(LOOK)]]
    assert found == []


def test_the_front_page_leads_to_everything(site, browser):
    pages, address, _ = site
    page = browser.new_page()
    page.goto(f"{address}/index.html")
    links = page.locator(".landing a").evaluate_all("links => links.map(a => a.href)")
    generated = {"genindex.html", "search.html", "index.html"}
    assert {f"{address}/{name}" for name in {*pages} - generated} == set(links)
    clone, *shown = page.locator(".landing pre").text_content().splitlines()
    assert clone.startswith("$ git clone")
    assert set(shown) <= set((ROOT / "README.md").read_text().splitlines())
    chapters = page.locator(".chapters dd").all_text_contents()
    assert len(chapters) == 11 and all(text.endswith("?") for text in chapters)
    page.get_by_placeholder("paste an error message").fill("Duplicate GPU detected")
    page.get_by_role("button", name="Search").click()
    page.locator("#search-results .search a").first.click()
    assert page.url.startswith(f"{address}/{TROUBLESHOOTING}")
    page.locator(".sidebar-brand").click()
    assert page.url == f"{address}/index.html"


def test_the_search_finds_each_message(site, browser):
    """Its heading comes first. If it is in AMONG_FIVE, the page is among the first five results."""
    page, wrong = browser.new_page(), {}
    headings = {re.findall("`(.+?)`", h)[0]: make_id(h) for h in HEADINGS if h.startswith("`")}
    assert len(headings) > 40
    for message, heading in (headings | dict.fromkeys(AMONG_FIVE)).items():
        page.goto(f"{site[1]}/search.html?q={quote(message)}")
        page.locator(".search-summary", has_text="Search finished").wait_for()
        links = page.locator("#search-results .search a")
        found = links.evaluate_all("links => links.map(link => link.getAttribute('href'))")
        places = [link.split("?")[0] for link in found]
        wanted = f"{TROUBLESHOOTING}#{heading}" if heading else TROUBLESHOOTING
        if wanted not in places[: 1 if heading else 5]:
            wrong[message] = heading, places[:5]
    assert wrong == {}


def failure(request):
    """Return what failed: nothing, if the next page only cut the request off."""
    return [] if "ERR_ABORTED" in request.failure else [f"{request.failure}: {request.url}"]


LOOK = """async () => {
  const root = document.documentElement, found = [];
  for (const image of document.images) {
    image.loading = "eager";
    await image.decode().catch(() => found.push("missing image: " + image.src.slice(0, 80)));
    if (!image.alt) found.push("image without a text: " + image.src.slice(0, 80));
  }
  if (root.scrollWidth > root.clientWidth)
    found.push(`wider than the screen: ${root.scrollWidth} pixels of ${root.clientWidth}`);
  return found;
}"""


def test_a_diff_is_readable_in_dark_mode(site, browser):
    """Its colors let the page's own background through, so that the text keeps its contrast."""
    page = browser.new_page(color_scheme="dark")
    page.goto(f"{site[1]}/notebooks/02_several_processes.html")
    line = page.locator("pre span", has_text="+import torch.distributed as dist").first
    color, background = line.evaluate(
        "line => [getComputedStyle(line).color, getComputedStyle(line).backgroundColor]"
    )
    assert background.startswith("rgba(46, 160, 67")
    assert sum(map(int, re.findall(r"\d+", color))) > 450


def test_the_reference_names_every_export():
    text = (ROOT / "docs" / "reference.md").read_text()
    named = re.findall(r"^\.\. auto\w+:: ddp_ref\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(public_names())


def test_the_reference_describes_every_handler_attribute_that_the_pages_use(site):
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.md")]
    used = {
        name
        for page in pages
        for name in re.findall(r"\bhandler\.(?!(?:py|md)\b)([a-z]\w*)", page.read_text())
    }
    reference = (site[2] / "docs" / "reference.html").read_text()
    named = re.findall(r'id="ddp_ref\.Handler\.(\w+)"', reference)
    assert len(used) > 15 and used <= set(named)
