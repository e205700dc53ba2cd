"""For the checks of exercises: a group that gives up soon, and errors of a missing partner."""

from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=5)  # far longer than a healthy collective takes here
# What gloo says when a collective has no partner: nobody came, or the peer has left the group.
NO_PARTNER = (
    "Timed out waiting",
    "Application timeout",
    "Connection closed",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
)


def open_impatient_group() -> None:
    """Open a gloo group whose collectives raise after `PATIENCE`.

    The short timeout is set only after all ranks have met. So a slow start is not taken for a hang.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(PATIENCE)


def has_no_partner(error: RuntimeError) -> bool:
    """Return whether a collective failed because the other rank did not join it."""
    return any(words in str(error) for words in NO_PARTNER)
