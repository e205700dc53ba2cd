"""Rounds in a file, one per line, so that several sittings add up."""

import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from plan import Plan
from rounds import Cost, Played

import ddp_ref


def package_hash() -> str:
    """Return a short hash of the package's source, which the rounds in one file share."""
    folder = Path(ddp_ref.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def load(path: Path) -> list[Played]:
    """Return the rounds in `path`, none if there is no such file.

    Exit with an error in one line if they are of another version of the package.
    """
    rounds, own = [], package_hash()
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            package, plan, cost = (row.pop(name) for name in ("package", "plan", "cost"))
            rounds.append(Played(plan=Plan(**plan), cost=Cost(**cost), **row))
        except (ValueError, KeyError, TypeError, AttributeError):
            sys.exit(f"error: line {number} of {path} is not a round: remove it")
        if package != own:
            sys.exit(
                f"error: {path} has rounds of the package {package}, but this package is {own}: "
                "give --save another file"
            )
    return rounds


def add(path: Path, played: Played) -> None:
    """Add a round to `path`. A file that does not exist yet is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"package": package_hash()} | asdict(played)) + "\n")
