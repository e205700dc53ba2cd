"""What the notebooks share: showing scripts, diffs and figures, running commands, checking answers.

It stands beside the notebooks, in whose folder their kernels start.
"""

from .commands import hide_gpus, load_ipython_extension, scratch_folder, shell
from .display import show_figure
from .exercise import Exercise
from .predictions import reveal
from .sources import show_diff, show_script

__all__ = [
    "Exercise",
    "hide_gpus",
    "load_ipython_extension",
    "reveal",
    "scratch_folder",
    "shell",
    "show_diff",
    "show_figure",
    "show_script",
]
