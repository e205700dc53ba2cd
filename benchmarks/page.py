"""A page of which a program writes a part, between two marks; and what it was measured on."""

import os
import platform
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"  # on the disk; /tmp may be in memory


def put_between(page: Path, begin: str, end: str, text: str) -> None:
    """Put `text` between the lines `begin` and `end` of `page`, in place of what is there."""
    head, tail = around_marks(page, begin, end)
    page.write_text(f"{head}\n\n{text.strip()}\n\n{tail}", encoding="utf-8")


def around_marks(page: Path, begin: str, end: str) -> tuple[str, str]:
    """Return the text of `page` up to the line `begin`, and from the line `end` on."""
    head, has_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    _, has_end, tail = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"{page} lacks the lines {begin} and {end}")
    return head + begin, end + tail


def require_marks(parser: ArgumentParser, page: Path | None, *pairs: tuple[str, str]) -> None:
    """Exit with the parser's error if the page lacks a pair of lines.

    Call it before the work begins, which may take hours.
    """
    try:
        for begin, end in pairs:
            if page:
                around_marks(page, begin, end)
    except (OSError, ValueError) as error:
        parser.error(f"cannot write the results into {page}: {error}")


def machine(packages: Sequence[str]) -> str:
    """Return the machine, today's date, and the versions of the installed `packages`."""
    from ddp_ref.launch import available_cores  # mp.spawn's processes load this module

    processor = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [f"{platform.system()} {platform.machine()}", processor[1] if processor else "?"]
    parts += [f"{available_cores()} cores", f"{memory:.0f} GiB"]
    parts.append(f"Python {platform.python_version()}")
    for package in packages:
        with suppress(PackageNotFoundError):
            parts.append(f"{package} {version(package)}")
    return ", ".join([*parts, str(date.today())])
