"""Chapter 04: a save that leaves the old file or the new one, whatever happens."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from lesson import Exercise

OLD, NEW = {"epochs_run": 5}, {"epochs_run": 10}


class Seen(NamedTuple):
    """What was found after a second save, and in `after_kill` after a third one that was killed."""

    content: object
    open_before: object  # read through a file that was opened before the second save
    gone: bool  # during that save there was a moment without a file at the path
    moved_from: list[Path]  # the folders from which a file was put at the path
    names: list[str]  # of the files in the folder
    after_kill: object


class Killer:
    """Kills the process that pickles it: in the middle of a save."""

    def __reduce__(self) -> tuple[Any, ...]:
        os.kill(os.getpid(), signal.SIGKILL)
        return (object, ())


def observe_save(save: Callable[[dict[str, Any], Path], Any]) -> Seen:
    """Save three times in a folder of this rank's own; the third save is killed midway."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pt"
        torch.save(OLD, path)
        with path.open("rb") as file:
            gone, moved_from = _watch(path, lambda: save(dict(NEW), path))
            content, open_before = _load(path), _load(file)
        names = sorted(entry.name for entry in path.parent.iterdir())
        child = os.fork()
        if child == 0:
            try:
                save({"epochs_run": 15, "killer": Killer()}, path)
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        return Seen(content, open_before, gone, moved_from, names, _load(path))


def _watch(path: Path, work: Callable[[], Any]) -> tuple[bool, list[Path]]:
    """Call `work`; say whether `path` was missing meanwhile, and from what other folders it came.

    Both are looked at whenever Python opens, moves or removes a file.
    """
    gone, folders = False, []
    watching = True  # a hook stays as long as the process

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal gone
        if not watching or not event.startswith(("open", "os.", "shutil.")):
            return
        gone = gone or not path.exists()
        if event == "os.rename" and Path(arguments[1]) == path:
            folders.append(Path(arguments[0]).resolve().parent)

    sys.addaudithook(hook)
    work()
    watching = False
    return gone, [folder for folder in folders if folder != path.parent.resolve()]


def _load(source: Any) -> object:
    try:
        return torch.load(source, weights_only=True)
    except Exception:  # noqa: BLE001 - a torn file can raise anything; none of it is a state
        return None


def judge_save(seen: list[Seen]) -> str | None:
    for rank in seen:
        if rank.content != NEW:
            return "after the call, torch.load does not find the new state at the path"
        if rank.after_kill != NEW:
            return "killed in the middle of a save, it leaves no readable file at the path"
        if rank.open_before != OLD:
            return "the bytes of the old file are written over: for a moment it is half of each"
        if rank.gone:
            return (
                "the old file is taken away before the new one is there: for a moment there is none"
            )
        if rank.moved_from:
            return f"it was written in {rank.moved_from[0]}, which may be another file system"
        if rank.names != ["snapshot.pt"]:
            return f"after a save the folder holds more than the snapshot: {', '.join(rank.names)}"
    return None


EXERCISES = {"save": Exercise(observe_save, judge_save)}
