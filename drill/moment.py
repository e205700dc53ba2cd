"""Make one rank wait at a moment of the training, so that the drill can inject its fault there."""

import functools
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import ddp_ref
from ddp_ref import Checkpoint, DistInfo, Handler, checkpoint, detect_launch, handler, trainer

TIMEOUT = 15  # seconds, of the collectives
VARIABLE = "DRILL_MOMENT"  # a JSON object: rank, place, nth
PATIENCE = 60  # seconds that the rank waits for the drill
# Files in the folder of the round, where the job runs.
REACHED = Path("reached")  # the rank writes its process id here when it starts to wait
INJECTED = Path("injected")  # the drill writes this once it has injected its fault
STEPS_TAKEN = Path("steps")  # has a byte for each step that the rank has taken
PLACES: dict[str, tuple[Any, str]] = {
    "load": (Handler, "load"),
    "step": (Handler, "_run_step"),
    "validation": (Handler, "_evaluate"),
    "epoch's end": (Checkpoint, "on_epoch_end"),
    "save": (handler, "gather_objects"),
}


def arm() -> None:
    """Make the rank that DRILL_MOMENT names wait before it reaches the place for the nth time.

    It waits only once per round: not again when torchrun or the drill has restarted it.
    """
    moment = json.loads(os.environ[VARIABLE])
    original = ddp_ref.initialize_ddp

    def armed(timeout: Any = None, *, rank: int | None = None, **place: Any) -> DistInfo:
        if moment["rank"] == (detect_launch().rank if rank is None else rank):
            if not REACHED.exists():
                wait_at(**moment)
            count_steps()
        return original(timedelta(seconds=TIMEOUT), rank=rank, **place)

    # train_reference.py calls the first one, and TrainerDDP the second one.
    ddp_ref.initialize_ddp = trainer.initialize_ddp = armed


def wait_at(rank: int, place: str, nth: int) -> None:
    if place == "start-up":  # before the group is open
        wait()
        return
    owner, name = PLACES[place]
    if (place, rank) == ("save", 0):  # it has written the new checkpoint, but not renamed it yet
        owner, name = checkpoint, "move_into_place"
    function, calls = getattr(owner, name), 0
    if place == "save":
        nth += 1  # `train` first tries to save

    @functools.wraps(function)
    def waits(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            wait()
        return function(*args, **kwargs)

    setattr(owner, name, waits)


def count_steps() -> None:
    """Make this rank append a byte to a file for each step, also after a restart."""
    take_step = Handler._run_step

    @functools.wraps(take_step)
    def counted(self: Handler, batches: Any) -> None:
        take_step(self, batches)
        with STEPS_TAKEN.open("ab") as file:
            file.write(b".")

    Handler._run_step = counted  # type: ignore[method-assign]


def wait() -> None:
    """Wait until the drill has injected its fault; if the drill asks for it, raise an error."""
    put(REACHED, str(os.getpid()))
    deadline = time.monotonic() + PATIENCE
    while not INJECTED.exists():
        if time.monotonic() > deadline:  # the drill was killed, and nobody else would end this rank
            raise TimeoutError(f"the drill has injected no fault within {PATIENCE} s")
        time.sleep(0.01)
    if error := INJECTED.read_text(encoding="utf-8"):
        raise RuntimeError(error)


def put(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, because another process waits for the file."""
    part = path.with_name(f".{path.name}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
