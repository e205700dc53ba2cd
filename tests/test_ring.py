"""The player for the all-reduce of chapter 00, every step in a browser.

Running chapter 00 compares the data and the words that it embeds.
"""

import pytest
import torch
from lesson.palette import RANKS
from lesson.ring import SimulatedRanks, replay, ring_all_reduce
from lesson.ring_player import player_data

pytestmark = pytest.mark.site


class Player:
    """The player on a page, as a reader sees it."""

    def __init__(self, page):
        self.root = page.locator(".ring-player")

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

    def assert_shows(self, ranks, step):
        messages = [message for message in ranks.log if message.step == step]
        states = replay(ranks)
        assert self.holdings() == states[step]
        assert self.arrows() == sorted((m.source, m.target, m.chunk) for m in messages)
        text = self.root.locator("[aria-live=polite] p").all_text_contents()
        assert text == player_data(ranks)["steps"][step]["text"]
        shown = self.root.locator(".controls span").inner_text()
        assert shown == f"step {step} of {len(states) - 1}"


def test_each_step_of_the_chapter(site, browser):
    page = browser.new_page()
    page.goto(f"{site[1]}/notebooks/00_what_ddp_is.html")
    player, ranks = Player(page), SimulatedRanks(torch.arange(16).reshape(4, 4))
    ring_all_reduce(ranks)
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
