"""What the notebooks share: showing scripts, diffs and figures, running commands, checking answers.

It stands beside the notebooks, in whose folder their kernels start.
"""

from .commands import hide_gpus, scratch_folder, shell, start_chapter
from .display import show_figure
from .exercise import Exercise
from .predictions import reveal
from .sources import show_diff, show_script

__all__ = [
    "Exercise",
    "hide_gpus",
    "reveal",
    "scratch_folder",
    "shell",
    "show_diff",
    "show_figure",
    "show_script",
]


def load_ipython_extension(_shell: object) -> None:
    """`%load_ext lesson`, the first cell of a chapter: go to an empty folder with the scripts."""
    start_chapter()
