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
    if ranks.world_size > len(RANKS):
        raise ValueError(
            f"the player has colours for {len(RANKS)} ranks, but there are {ranks.world_size}: "
            "simulate fewer ranks"
        )
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
    if not messages:
        return f"Step {step}: no rank sends anything."
    chunks: dict[tuple[int, int], list[str]] = {}  # by source and target
    for message in messages:
        chunks.setdefault((message.source, message.target), []).append(str(message.chunk))
    sent = [
        f"rank {source} sends chunk{'s' * (len(its) > 1)} {_listed(its)} to rank {target}"
        for (source, target), its in chunks.items()
    ]
    return f"Step {step}, {'add' if messages[0].add else 'copy'}: {_listed(sent)}."


def _progress_in_words(ranks: SimulatedRanks, step: int, holdings: Holdings) -> str:
    """Say how much each rank has sent up to a step, and how many chunks are complete."""
    sent = [0] * ranks.world_size
    for message in ranks.log:
        sent[message.source] += message.size * (message.step <= step)
    if len(set(sent)) == 1:
        traffic = f"Each rank has sent {sent[0]} bytes so far."
    else:
        each = [f"{size} bytes by rank {rank}" for rank, size in enumerate(sent)]
        traffic = f"Sent so far: {_listed(each)}."
    held = [len(whose) for row in holdings for whose in row]
    complete = held.count(ranks.world_size)
    return f"{traffic} {complete} of {len(held)} chunks hold the sum over all ranks."


def _listed(words: list[str]) -> str:
    """Return, for example, "0, 1 and 2"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
