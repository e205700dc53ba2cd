"""Typical wrong answers to the exercise of chapter 03, each with words of its hint."""

from pathlib import Path

import torch


def in_place(path, content):
    torch.save(content, path)


def unlinked_first(path, content):
    temporary = Path(f"{path}.tmp")
    torch.save(content, temporary)
    path.unlink()
    temporary.rename(path)


MISTAKES = {
    "save": [
        (in_place, "the process was killed in the middle of a save"),
        (unlinked_first, "your function removes the old file before the new one has its name"),
    ]
}
