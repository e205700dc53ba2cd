"""What child processes write to stderr, which a notebook may show or lose."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile


@contextmanager
def stderr_of_children() -> Iterator[list[str]]:
    """Give a list that holds, after the block, the lines that processes wrote to this stderr."""
    lines: list[str] = []
    with TemporaryFile("w+") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)  # a child inherits descriptors, not Python's sys.stderr
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().splitlines()
