"""Slurm's host lists, such as `rack[1-2]-n[03-05,7]`. Standard library only."""

import re
from collections.abc import Iterator

MAX_RANGE = 65_536  # hosts in one range, as in Slurm
SEPARATORS = ", \t\n"
_NUMBER = re.compile(r"[0-9]{1,18}")
_PART = re.compile(r"([^][,\s]*\[[^][]*])+|[^][,\s]+")  # a name, its brackets last
_PIECE = re.compile(r"([^][]*)\[([^][]*)]|([^][]+)")
_Span = tuple[range, int]  # numbers, and the width their leading zeros fill
_Piece = tuple[str, list[_Span]]  # letters, and the bracket after them


def expand_hostlist(text: str) -> list[str]:
    """Return the hosts of a Slurm host list as `scontrol show hostnames` does, duplicates too.

    Raises ValueError for malformed text, naming the place, and a range of more than 65,536 hosts.
    """
    parts = _parse_hostlist(text)
    for numbers in (span[0] for part in parts for _, spans in part for span in spans):
        if len(numbers) > MAX_RANGE:
            raise ValueError(f"host list {text!r}: {numbers} is more than {MAX_RANGE} hosts")
    return [host for part in parts for host in _expand(part)]


def first_host(text: str) -> str:
    """Return the first host of a Slurm host list of any size; ValueError for malformed text."""
    return next(_expand(_parse_hostlist(text)[0]))


def _parse_hostlist(text: str) -> list[list[_Piece]]:
    """Return the parts of a host list, which commas separate, with nothing expanded."""
    parts: list[list[_Piece]] = []
    end = 0
    for part in _PART.finditer(text):
        gap = text[end : part.start()]
        if gap.strip(SEPARATORS) or (parts and not gap):
            raise _malformed(text, end)
        pieces = _PIECE.finditer(text, *part.span())
        parts.append([(p[1] or p[3] or "", _parse_bracket(text, *p.span(2))) for p in pieces])
        end = part.end()
    if text[end:].strip(SEPARATORS) or not parts:
        raise _malformed(text, end)
    return parts


def _parse_bracket(text: str, start: int, stop: int) -> list[_Span]:
    spans: list[_Span] = []
    for item in text[start:stop].split(",") if start >= 0 else []:
        low, dash, high = item.partition("-")
        high = high if dash else low
        if not (_NUMBER.fullmatch(low) and _NUMBER.fullmatch(high) and int(low) <= int(high)):
            raise _malformed(text, start)
        spans.append((range(int(low), int(high) + 1), len(low)))
        start += len(item) + 1
    return spans


def _malformed(text: str, place: int) -> ValueError:
    return ValueError(f"malformed host list {text!r} at {place}: {text[place:]!r}")


def _expand(pieces: list[_Piece]) -> Iterator[str]:
    """Yield the names in Slurm's order: the last bracket runs fastest, then the first, second..."""
    return (head + tail for head in _heads(pieces[:-1]) for tail in _names(pieces[-1]))


def _heads(pieces: list[_Piece]) -> Iterator[str]:
    if not pieces:
        return iter([""])
    return (head + tail for tail in _names(pieces[-1]) for head in _heads(pieces[:-1]))


def _names(piece: _Piece) -> Iterator[str]:
    letters, spans = piece
    numbered = (f"{letters}{number:0{width}}" for numbers, width in spans for number in numbers)
    return numbered if spans else iter([letters])
