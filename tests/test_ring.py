"""The player for the all-reduce of chapter 00: its data, and every step in a browser."""

import json
import re
from dataclasses import asdict
from functools import partial

import pytest
import torch
from lesson.palette import COMMUNICATE, RANKS
from lesson.ring import SimulatedRanks, replay, ring_all_reduce, through_rank_0
from lesson.ring_player import FOLDER, player_html

CHAPTER = "notebooks/00_what_ddp_is.html"
START = "At the start, each rank holds only its own numbers."


def played(algorithm, world_size=4):
    """Return ranks that have summed their vectors: a number of 8 bytes in each chunk."""
    ranks = SimulatedRanks(torch.arange(world_size**2).reshape(world_size, -1))
    algorithm(ranks)
    return ranks


def embedded(html):
    """Return the data in the output: the second line of the call of playRing."""
    return json.loads(re.search(r"^playRing\(.+,\n(.+),\n", html, re.MULTILINE)[1])


@pytest.mark.parametrize("algorithm", [ring_all_reduce, through_rank_0])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_data_is_the_log_and_its_replay(algorithm, world_size):
    ranks = played(algorithm, world_size)
    data = embedded(player_html(ranks))
    messages = [message for step in data["steps"] for message in step["messages"]]
    assert messages == [asdict(message) for message in ranks.log]
    for number, step in enumerate(data["steps"]):
        assert {message["step"] for message in step["messages"]} <= {number}
    assert [step["holdings"] for step in data["steps"]] == replay(ranks)
    assert data["colors"] == {"ranks": RANKS[:world_size], "communicate": COMMUNICATE}


def test_a_step_in_words():
    steps = embedded(player_html(played(ring_all_reduce)))["steps"]
    assert [step["text"] for step in (steps[0], steps[2], steps[6])] == [
        [
            START,
            "Each rank has sent 0 bytes so far. 0 of 16 chunks hold the sum over all ranks.",
        ],
        [
            "Step 2, add: rank 0 sends chunk 3 to rank 1, rank 1 sends chunk 0 to rank 2, "
            "rank 2 sends chunk 1 to rank 3 and rank 3 sends chunk 2 to rank 0.",
            "Each rank has sent 16 bytes so far. 0 of 16 chunks hold the sum over all ranks.",
        ],
        [
            "Step 6, copy: rank 0 sends chunk 3 to rank 1, rank 1 sends chunk 0 to rank 2, "
            "rank 2 sends chunk 1 to rank 3 and rank 3 sends chunk 2 to rank 0.",
            "Each rank has sent 48 bytes so far. 16 of 16 chunks hold the sum over all ranks.",
        ],
    ]
    steps = embedded(player_html(played(through_rank_0, world_size=3)))["steps"]
    assert steps[1]["text"] == [
        "Step 1, add: rank 1 sends chunks 0, 1 and 2 to rank 0 and "
        "rank 2 sends chunks 0, 1 and 2 to rank 0.",
        "Sent so far: 0 bytes by rank 0, 24 bytes by rank 1 and 24 bytes by rank 2. "
        "3 of 9 chunks hold the sum over all ranks.",
    ]


def test_a_step_without_messages():
    ranks = SimulatedRanks(torch.ones(2, 2))
    ranks.exchange([], add=True)
    assert embedded(player_html(ranks))["steps"][1]["text"][0] == "Step 1: no rank sends anything."


def test_more_ranks_than_colours_are_refused():
    with pytest.raises(ValueError, match="colours for 4 ranks, but there are 5"):
        player_html(played(ring_all_reduce, world_size=5))


def test_the_output_is_an_empty_element_and_a_script():
    """Where scripts do not run, nothing shows. Without ids, two outputs on a page can be equal."""
    html = player_html(played(ring_all_reduce))
    assert re.sub(r"<script>.*</script>", "", html, flags=re.DOTALL).split() == [
        "<div",
        'class="ring-player"></div>',
    ]
    assert html.count("<script") == html.count("</script") == 1 and " id=" not in html
    assert html == player_html(played(ring_all_reduce))


def test_the_script_knows_no_algorithm():
    """The script only draws: the colours and the words of the steps come with the data."""
    script = (FOLDER / "ring_player.js").read_text()
    assert not re.search(r"#[0-9A-F]{6}|all-gather|reduce-scatter|% size|fetch\(|import", script)


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

    def titles(self):
        return self.root.locator("[data-chunk] title").all_text_contents()

    def arrows(self):
        """Return the source, the target and the chunk for each number beside an arrow."""
        arrows = self.root.locator(".arrow").evaluate_all(
            "arrows => arrows.map(a => [a.dataset.source, a.dataset.target, a.textContent])"
        )
        return sorted((int(a), int(b), int(c)) for a, b, text in arrows for c in text.split())

    def arrived(self):
        places = self.root.locator("[data-chunk]:has(.arrived)").evaluate_all(
            "chunks => chunks.map(chunk => [chunk.dataset.rank, chunk.dataset.chunk])"
        )
        return sorted((int(rank), int(chunk)) for rank, chunk in places)

    def text(self):
        return self.root.locator("[aria-live=polite] p").all_text_contents()

    def step(self):
        return self.root.locator(".controls span").inner_text()

    def assert_shows(self, ranks, step):
        messages = [message for message in ranks.log if message.step == step]
        states = replay(ranks)
        assert self.holdings() == states[step]
        assert self.arrows() == sorted((m.source, m.target, m.chunk) for m in messages)
        assert self.arrived() == sorted({(m.target, m.chunk) for m in messages})
        assert self.text() == embedded(player_html(ranks))["steps"][step]["text"]
        assert self.step() == f"step {step} of {len(states) - 1}"


@pytest.fixture
def open_player(browser):
    """Return a function that opens a page with players. The page's console must stay silent."""
    opened = []

    def open_page(address, number=0, width=390, scheme="light", html=None):
        size = {"width": width, "height": 844}
        page = browser.new_page(viewport=size, color_scheme=scheme)
        opened.append(Player(page, number))
        if html is None:
            page.goto(address)
        else:
            page.set_content(html)
        return opened[-1]

    yield open_page
    assert [player.messages for player in opened] == [[] for _ in opened]


@pytest.fixture
def in_chapter(site, open_player):
    return partial(open_player, f"{site[1]}/{CHAPTER}")


@pytest.mark.site
def test_each_step_of_the_chapter(in_chapter):
    player, ranks = in_chapter(), played(ring_all_reduce)
    for step in range(6):
        player.assert_shows(ranks, step)
        player.click("Next")
    player.assert_shows(ranks, 6)
    assert player.holdings() == [[[0, 1, 2, 3]] * 4] * 4
    player.click("Next")  # there is no step 7
    player.assert_shows(ranks, 6)
    for step in reversed(range(6)):
        player.click("Back")
        player.assert_shows(ranks, step)
    player.click("Back")
    player.assert_shows(ranks, 0)


@pytest.mark.site
def test_a_chunk_says_whose_numbers_it_holds(in_chapter):
    player = in_chapter()
    player.click("Next")
    wanted = "Rank 1, chunk 0: the numbers of rank 0 and rank 1"
    assert wanted in player.titles()
    assert wanted in player.root.locator("svg").get_attribute("aria-label")
    player.root.locator("[data-rank='1'][data-chunk='0'] .outline").click(force=True)
    assert player.root.locator(".hint").inner_text() == wanted


@pytest.mark.site
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


@pytest.mark.site
def test_it_plays_to_the_end_and_pauses(open_player):
    player = open_player(None, html=player_html(played(ring_all_reduce, world_size=2)))
    clock = player.page.clock
    clock.install(time=0)
    clock.pause_at(1)  # from here on, time passes only in run_for
    play = player.root.get_by_role("button", name="Play")
    play.click()
    assert play.inner_text() == "Pause"
    clock.run_for(2400)  # milliseconds: a step takes 2.5 seconds
    assert player.step() == "step 0 of 2"
    clock.run_for(100)
    assert player.step() == "step 1 of 2"
    clock.run_for(2500)
    assert player.step() == "step 2 of 2"
    assert play.inner_text() == "Play"
    play.click()  # again, from the start
    assert player.step() == "step 0 of 2"
    play.click()
    clock.run_for(10_000)
    assert player.step() == "step 0 of 2"


@pytest.mark.site
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_log_can_be_played_and_players_are_independent(open_player, world_size):
    others, ranks = played(ring_all_reduce), played(through_rank_0, world_size)
    outputs = [player_html(others), player_html(ranks), player_html(ranks)]
    without_script = '<div class="ring-player"></div>'  # as in a notebook that is not trusted
    html = "".join(f"<div>{output}</div>" for output in [without_script, *outputs])
    player = open_player(None, number=2, html=html)
    for step in range(1, ranks.steps + 1):
        player.click("Next")
        player.assert_shows(ranks, step)
    Player(player.page, 1).assert_shows(others, 0)
    Player(player.page, 3).assert_shows(ranks, 0)


@pytest.mark.site
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
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
    assert player.page.evaluate("document.documentElement.scrollWidth") <= width


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
