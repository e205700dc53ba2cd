"""Have one rank wait at a moment of the training, so that the drill strikes there and then."""

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

from ddp_ref import Checkpoint, Handler, TrainerDDP
from ddp_ref.training import checkpoint, train_state
from ddp_ref.training.loop import TrainLoop

VARIABLE = "DRILL_MOMENT"  # a JSON object: rank, place, nth
PATIENCE = 60  # seconds, with the drill
REACHED, STRUCK = Path("reached"), Path("struck")  # in the folder of the round, the job's own
STEPS_TAKEN = Path("steps")  # there as well: a byte for each step that the rank has taken
WRITING = checkpoint, "_check_readable"  # rank 0: the new file is there, under another name
PLACES: dict[str, tuple[Any, str]] = {
    "start-up": (TrainerDDP, "__init__"),  # before the group is open
    "load": (Handler, "load"),
    "step": (TrainLoop, "_train_step"),
    "validation": (Handler, "validate"),
    "epoch's end": (Checkpoint, "on_epoch_end"),
    "save": (train_state, "gather_objects"),  # where the others wait as well
}


def arm() -> None:
    """Wait, in the rank that DRILL_MOMENT names, before its nth visit of the place: once a round.

    A rank that is started again, by torchrun or by the drill, finds the moment over.
    """
    asked = json.loads(os.environ[VARIABLE])
    begin = TrainerDDP.__init__

    def begin_armed(self: TrainerDDP, rank: int, config: Any) -> None:
        if rank == asked["rank"] and not REACHED.exists():
            owner, name = PLACES[asked["place"]]
            if name == "__init__":
                wait()
            elif asked["place"] == "save" and rank == 0:
                wait_before(*WRITING, nth=asked["nth"])
            else:
                wait_before(owner, name, nth=asked["nth"])
        if rank == asked["rank"]:
            count_steps()
        begin(self, rank, config)

    TrainerDDP.__init__ = begin_armed  # type: ignore[method-assign]


def wait_before(owner: Any, name: str, nth: int) -> None:
    """Wait before the nth call of what `owner` has under `name`."""
    function, calls = getattr(owner, name), 0

    @functools.wraps(function)
    def waits(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            wait()
        return function(*args, **kwargs)

    setattr(owner, name, waits)


def count_steps() -> None:
    """Write a byte for each step that this rank takes; the next process of the rank adds to it."""
    take_step = TrainLoop._train_step

    @functools.wraps(take_step)
    def counted(self: TrainLoop, window: Any) -> None:
        take_step(self, window)
        with STEPS_TAKEN.open("ab") as file:
            file.write(b".")

    TrainLoop._train_step = counted  # type: ignore[method-assign]


def wait() -> None:
    """Say that the moment is there and wait until the drill has struck; raise if it says so."""
    put(REACHED, str(os.getpid()))
    deadline = time.monotonic() + PATIENCE
    while not STRUCK.exists():
        if time.monotonic() > deadline:  # it was killed: nobody else would end this rank
            raise TimeoutError("the drill has not struck")
        time.sleep(0.01)
    if error := STRUCK.read_text(encoding="utf-8"):
        raise RuntimeError(error)


def put(path: Path, text: str) -> None:
    """Write `text` to `path` in one step: the other side looks for the file."""
    part = path.with_name(f".{path.name}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
