"""Save rounds in a file, one per line, so that several runs of the drill add up."""

import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from plan import Plan
from rounds import Cost, RoundResult

import ddp_ref

ROOT = Path(__file__).resolve().parent.parent
# What decides how a round or a soak ends, besides the package and the drill.
FILES = (
    "datautils.py",
    "scripts/char_gpt.py",
    "scripts/configs/digits.yaml",
    "scripts/train_reference.py",
    "tests/harness.py",
)


def code_version() -> str:
    """Return a short hash of the package, the drill, `FILES`, and the version of torch."""
    folders = Path(ddp_ref.__file__).parent, ROOT / "drill"
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    digest = hashlib.sha256(torch.__version__.encode())
    for file in [*files, *(ROOT / name for name in FILES)]:
        digest.update(f"{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def load(path: Path, current: str) -> list[RoundResult]:
    """Return the rounds in `path`, or [] if there is no such file.

    Exit with an error if they come from another version of the code than `current`.
    """
    rounds = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if (version := row.pop("version")) != current:
                sys.exit(
                    f"error: {path} has rounds of version {version}, but this is version {current} "
                    "of the package, the drill, its job and torch: give --save another file"
                )
            plan, cost = row.pop("plan"), row.pop("cost")
            rounds.append(RoundResult(plan=Plan(**plan), cost=Cost(**cost), **row))
        except (ValueError, KeyError, TypeError, AttributeError):
            sys.exit(f"error: line {number} of {path} is not a round: remove it")
    return rounds


def add(path: Path, result: RoundResult, version: str) -> None:
    """Append the result of a round to `path`, and create the file if it does not exist.

    Exit with an error if the code has changed since it was `version`.
    """
    if code_version() != version:
        sys.exit("error: the code has changed since the drill began, so the drill stops")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"version": version} | asdict(result)) + "\n")
