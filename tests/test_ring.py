"""The player for the all-reduce of chapter 00, every step in a browser.

Running chapter 00 compares the data and the words that it embeds.
"""

import re
from functools import partial

import pytest
import torch
from lesson.palette import RANKS
from lesson.ring import SimulatedRanks, replay, ring_all_reduce
from lesson.ring_player import player_data, player_html

pytestmark = pytest.mark.site
CHAPTER = "notebooks/00_what_ddp_is.html"


def played(world_size=4):
    """Return ranks that have summed their vectors: a number of 8 bytes in each chunk."""
    ranks = SimulatedRanks(torch.arange(world_size**2).reshape(world_size, -1))
    ring_all_reduce(ranks)
    return ranks


class Player:
    """A player on a page, and what a reader sees of it."""

    def __init__(self, page, number=0):
        self.page, self.root = page, page.locator(".ring-player").nth(number)
        self.messages = []
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))

    def click(self, name):
        """Click a button, even at an end. Without force, playwright waits until it is enabled."""
        self.root.get_by_role("button", name=name).click(force=True)

    def holdings(self):
        """Return, for each rank and chunk, the ranks whose colours it has, from top to bottom."""
        stripes = self.root.locator("[data-chunk]").evaluate_all(
            """chunks => chunks.map(chunk => [
              chunk.dataset.rank, chunk.dataset.chunk,
              [...chunk.querySelectorAll("rect[fill]")]
                .map(stripe => [stripe.getBBox().y, stripe.getAttribute("fill")]),
            ])"""
        )
        rows = {}
        for rank, chunk, boxes in stripes:
            held = [RANKS.index(colour) for _, colour in sorted(boxes)]
            rows.setdefault(int(rank), {})[int(chunk)] = held
        return [[row[chunk] for chunk in sorted(row)] for _, row in sorted(rows.items())]

    def arrows(self):
        """Return the source, the target and the chunk of each arrow."""
        arrows = self.root.locator(".arrow").evaluate_all(
            "arrows => arrows.map(a => [a.dataset.source, a.dataset.target, a.textContent])"
        )
        return sorted(tuple(map(int, arrow)) for arrow in arrows)

    def arrived(self):
        places = self.root.locator("[data-chunk]:has(.arrived)").evaluate_all(
            "chunks => chunks.map(chunk => [chunk.dataset.rank, chunk.dataset.chunk])"
        )
        return sorted((int(rank), int(chunk)) for rank, chunk in places)

    def step(self):
        return self.root.locator(".controls span").inner_text()

    def assert_shows(self, ranks, step):
        messages = [message for message in ranks.log if message.step == step]
        states = replay(ranks)
        assert self.holdings() == states[step]
        assert self.arrows() == sorted((m.source, m.target, m.chunk) for m in messages)
        assert self.arrived() == sorted((m.target, m.chunk) for m in messages)
        text = self.root.locator("[aria-live=polite] p").all_text_contents()
        assert text == player_data(ranks)["steps"][step]["text"]
        assert self.step() == f"step {step} of {len(states) - 1}"


@pytest.fixture
def open_player(browser):
    """Return a function that opens a page with players. The page's console must stay silent."""
    opened = []

    def open_page(address=None, number=0, width=390, scheme="light", html=""):
        size = {"width": width, "height": 844}
        page = browser.new_page(viewport=size, color_scheme=scheme)
        opened.append(Player(page, number))
        if address:
            page.goto(address)
        else:
            page.set_content(html)
        return opened[-1]

    yield open_page
    assert [player.messages for player in opened] == [[] for _ in opened]


@pytest.fixture
def in_chapter(site, open_player):
    return partial(open_player, f"{site[1]}/{CHAPTER}")


def test_each_step_of_the_chapter(in_chapter):
    player, ranks = in_chapter(), played()
    for step in range(6):
        player.assert_shows(ranks, step)
        player.click("Next")
    player.assert_shows(ranks, 6)
    assert player.holdings() == [[[0, 1, 2, 3]] * 4] * 4
    player.click("Next")  # there is no step 7
    player.assert_shows(ranks, 6)
    for step in (5, 4, 3, 2, 1, 0, 0):
        player.click("Back")
        player.assert_shows(ranks, step)


def test_a_chunk_says_whose_numbers_it_holds(in_chapter):
    player = in_chapter()
    player.click("Next")
    wanted = "Rank 1, chunk 0: the numbers of rank 0 and rank 1"
    assert wanted in player.root.locator("[data-chunk] title").all_text_contents()
    assert wanted in player.root.locator("svg").get_attribute("aria-label")
    player.root.locator("[data-rank='1'][data-chunk='0'] .outline").click(force=True)
    assert player.root.locator(".hint").inner_text() == wanted


def test_arrow_keys_move_the_player_and_leave_browser_shortcuts_alone(in_chapter):
    player = in_chapter()
    press = player.page.keyboard.press
    press("ArrowRight")  # the page has the focus, not the player
    assert player.step() == "step 0 of 6"
    player.root.get_by_role("button", name="Back").focus()
    for key, step in [("ArrowLeft", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)]:
        press(key)
        assert player.step() == f"step {step} of 6"
    press("Control+ArrowRight")
    assert player.step() == "step 1 of 6"
    for name in ("Next", "Play"):  # the keyboard reaches all buttons
        press("Tab")
        assert player.page.evaluate("document.activeElement.textContent") == name


def test_it_plays_to_the_end_and_pauses(open_player):
    player = open_player(html=player_html(played(world_size=2)))
    clock = player.page.clock
    clock.install(time=0)
    clock.pause_at(1)  # from here on, time passes only in run_for
    play = player.root.get_by_role("button", name="Play")
    play.click()
    assert play.inner_text() == "Pause"
    # milliseconds: a step takes 2.5 seconds
    for time, step in [(2400, 0), (100, 1), (2500, 2)]:
        clock.run_for(time)
        assert player.step() == f"step {step} of 2"
    assert play.inner_text() == "Play"
    play.click()  # again, from the start
    assert player.step() == "step 0 of 2"
    play.click()
    clock.run_for(10_000)
    assert player.step() == "step 0 of 2"


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_the_player_is_readable(in_chapter, width, scheme):
    """It fits the screen, its texts are not cut off, and they differ from the background."""
    player = in_chapter(width=width, scheme=scheme)
    for _ in range(6):
        player.click("Next")
        assert player.page.evaluate(OVERFLOW) == []
        inks = set(player.root.locator("svg text, p, button, .outline").evaluate_all(INKS))
        assert len(inks) == 1
        dark = sum(map(int, re.findall(r"\d+", inks.pop())[:3])) < 3 * 128
        assert dark == (scheme == "light")


OVERFLOW = """() => {
  const root = document.querySelector(".ring-player"), picture = root.querySelector("svg");
  const [limits, frame] = [root, picture].map((element) => element.getBoundingClientRect());
  return [...root.querySelectorAll("*:not(style, title)")].filter((element) => {
    const { left, right, top, bottom } = element.getBoundingClientRect();
    const inside = element.ownerSVGElement ? frame : limits;
    return left < inside.left - 1 || right > inside.right + 1
      || top < inside.top - 1 || bottom > inside.bottom + 1;
  }).map((element) => element.outerHTML.slice(0, 80));
}"""
INKS = """elements => elements.map((element) => {
  const { color, fill, stroke } = getComputedStyle(element);
  return element.tagName === "text" ? fill : element.tagName === "rect" ? stroke : color;
})"""
