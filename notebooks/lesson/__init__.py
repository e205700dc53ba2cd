"""What the notebooks share: an empty folder to work in, the diff of two scripts, checked answers.

It stands beside the notebooks, in whose folder their kernels start.
"""

from .commands import hide_gpus, load_ipython_extension
from .exercise import Exercise
from .sources import show_beside, show_diff

__all__ = ["Exercise", "hide_gpus", "load_ipython_extension", "show_beside", "show_diff"]
