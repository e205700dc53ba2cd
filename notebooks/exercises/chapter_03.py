"""The exercise of chapter 03: a save that leaves the old file or the new one, always whole."""

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
    """What a second save did, and in `after_kill` what a killed third save left."""

    content: object
    open_before: object  # read through a file that was opened before the second save
    gone: bool  # at some moment during that save, there was no file at the path
    moved_from: list[Path]  # the other folders from which a file was moved to the path
    names: list[str]  # the files in the folder
    after_kill: object


class Killer:
    """Kills the process that pickles it: in the middle of a save."""

    def __reduce__(self) -> tuple[Any, ...]:
        os.kill(os.getpid(), signal.SIGKILL)
        return (object, ())


def observe_save(save: Callable[[Path, dict[str, Any]], Any]) -> Seen:
    """Save three times; the third save is killed midway."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pt"
        torch.save(OLD, path)
        with path.open("rb") as file:
            gone, moved_from = _watch(path, lambda: save(path, dict(NEW)))
            content, open_before = _load(path), _load(file)
        names = sorted(entry.name for entry in path.parent.iterdir())
        child = os.fork()
        if child == 0:
            try:
                save(path, {"epochs_run": 15, "killer": Killer()})
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        return Seen(content, open_before, gone, moved_from, names, _load(path))


def _watch(path: Path, work: Callable[[], Any]) -> tuple[bool, list[Path]]:
    """Call `work`; return whether `path` was missing meanwhile, and from which folders it came.

    The hook looks whenever Python opens, moves or removes a file.
    """
    gone, folders = False, []
    watching = True  # because an audit hook cannot be removed

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
    except Exception:  # noqa: BLE001 - a torn file can raise anything; none of it is content
        return None


def judge_save(seen: list[Seen]) -> str | None:
    save = seen[0]
    if save.content != NEW:
        return (
            "after your function returned, torch.load did not find the new content at `path`. "
            "Whatever file you write first, give it the name `path` in the end: "
            "`temporary.replace(path)` does that."
        )
    if save.after_kill != NEW:
        return (
            "the process was killed in the middle of a save, and no readable file was left at "
            "`path`. torch.save empties a file before it fills it, so let it write to a "
            "temporary file, and rename that file when it is complete."
        )
    if save.open_before != OLD:
        return (
            "your function writes over the bytes of the old file, so for a moment the file is "
            "half old and half new. Do not copy the new bytes into it. "
            "`temporary.replace(path)` moves only the name."
        )
    if save.gone:
        return (
            "your function removes the old file before the new one has its name, so for a "
            "moment there is no file at all. `temporary.replace(path)` does both in one step, "
            "and the old file need not be removed first."
        )
    if save.moved_from:
        return (
            f"your function writes the temporary file to {save.moved_from[0]}. That folder may "
            "be on another file system, and between two file systems a file cannot be moved in "
            "one step. Put it beside the snapshot, with `path.with_name(...)`."
        )
    if save.names != ["snapshot.pt"]:
        return (
            "after a save, the folder holds more than the snapshot: "
            f"{', '.join(save.names)}. Such files add up over a long training. "
            "`temporary.replace(path)` leaves neither the temporary nor the old file."
        )
    return None


EXERCISES = {"save": Exercise(observe_save, judge_save, nproc=1)}
