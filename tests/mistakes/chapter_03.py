"""Typical wrong answers to the exercise of chapter 03, each with words of its hint."""

import shutil
import tempfile
from pathlib import Path

import torch


def in_place(path, content):
    torch.save(content, path)


def copied(path, content):
    temporary = Path(f"{path}.tmp")
    torch.save(content, temporary)
    shutil.copyfile(temporary, path)
    temporary.unlink()


def unlinked_first(path, content):
    temporary = Path(f"{path}.tmp")
    torch.save(content, temporary)
    path.unlink()
    temporary.rename(path)


def in_another_folder(path, content):
    with tempfile.TemporaryDirectory() as folder:
        torch.save(content, temporary := Path(folder) / path.name)
        temporary.replace(path)


def never_renamed(path, content):
    torch.save(content, Path(f"{path}.tmp"))


def with_the_old_one_kept(path, content):
    temporary, backup = Path(f"{path}.tmp"), Path(f"{path}.bak")
    torch.save(content, temporary)
    shutil.copyfile(path, backup)
    temporary.replace(path)


MISTAKES = {
    "save": [
        (in_place, "the process was killed in the middle of a save"),
        (copied, "your function writes over the bytes of the old file"),
        (unlinked_first, "your function removes the old file before the new one has its name"),
        (in_another_folder, "may be on another file system"),
        (never_renamed, "torch.load did not find the new content"),
        (with_the_old_one_kept, "the folder holds more than the snapshot"),
    ]
}
