"""A player for the log of simulated ranks: click through what they sent, step by step."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from IPython.display import display

from .palette import COMMUNICATE, RANKS
from .ring import Holdings, Message, SimulatedRanks, replay, ring_all_reduce

FOLDER = Path(__file__).parent


def play_ring() -> None:
    """Show a player for the ring of 4 ranks, which hold 4 chunks of one number each.

    It needs JavaScript. GitHub runs no scripts in a notebook, so there the output is empty.
    """
    ranks = SimulatedRanks(torch.arange(16).reshape(4, 4))
    ring_all_reduce(ranks)
    words = "\n".join(" ".join(step["text"]) for step in player_data(ranks)["steps"])
    display({"text/html": player_html(ranks), "text/plain": words}, raw=True)


def player_html(ranks: SimulatedRanks) -> str:
    """Return an empty element, and a script that fills it with the player."""
    # In a script, "<" could begin a tag that ends it.
    data = json.dumps(player_data(ranks)).replace("<", "\\u003c")
    style = json.dumps((FOLDER / "ring_player.css").read_text(encoding="utf-8"))
    script = (FOLDER / "ring_player.js").read_text(encoding="utf-8")
    # The element is found from the script, because an id could be on the page twice: JupyterLab
    # can show the same output in two places.
    element = 'document.currentScript.parentNode.querySelector(".ring-player:empty")'
    call = f"playRing({element},\n{data},\n{style});"
    return f'<div class="ring-player"></div>\n<script>\n{{\n{script}\n{call}\n}}\n</script>'


def player_data(ranks: SimulatedRanks) -> dict[str, Any]:
    """Return the colours, and each step's messages, holdings and words, as the script gets them."""
    steps = []
    for step, holdings in enumerate(replay(ranks)):
        messages = [message for message in ranks.log if message.step == step]
        text = [_messages_in_words(step, messages), _progress_in_words(ranks, step, holdings)]
        sent = [asdict(message) for message in messages]
        steps.append({"messages": sent, "holdings": holdings, "text": text})
    colors = {"ranks": RANKS[: ranks.world_size], "communicate": COMMUNICATE}
    return {"colors": colors, "steps": steps}


def _messages_in_words(step: int, messages: list[Message]) -> str:
    """Say who sends what to whom in a step, which is 0 at the start."""
    if step == 0:
        return "At the start, each rank holds only its own numbers."
    sent = [f"rank {m.source} sends chunk {m.chunk} to rank {m.target}" for m in messages]
    listed = " and ".join([", ".join(sent[:-1]), sent[-1]])
    return f"Step {step}, {'add' if messages[0].add else 'copy'}: {listed}."


def _progress_in_words(ranks: SimulatedRanks, step: int, holdings: Holdings) -> str:
    """Say how much each rank has sent up to a step, and how many chunks are complete."""
    sent = sum(message.size for message in ranks.log if message.step <= step)
    held = [len(whose) for row in holdings for whose in row]
    return (
        f"Each rank has sent {sent // ranks.world_size} bytes so far. "
        f"{held.count(ranks.world_size)} of {len(held)} chunks hold the sum over all ranks."
    )
