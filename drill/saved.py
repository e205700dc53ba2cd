"""Rounds in a file, one per line, so that several sittings add up."""

import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from plan import Plan
from rounds import Cost, Played

import ddp_ref

ROOT = Path(__file__).resolve().parent.parent
JOB = ("scripts/train_reference.py", "scripts/configs/digits.yaml", "datautils.py")
DRILL = ("faults", "job", "judge", "launchers", "moment", "plan", "rounds")  # not what it tells


def code_version() -> str:
    """Return a short hash of what the rounds in one file share.

    It covers the package, the drill, the job that it breaks, and the version of torch.
    """
    package = Path(ddp_ref.__file__).parent
    digest = hashlib.sha256(torch.__version__.encode())
    others = [ROOT / "drill" / f"{name}.py" for name in DRILL] + [ROOT / name for name in JOB]
    for file in [*sorted(package.rglob("*.py")), *others]:
        digest.update(f"{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def load(path: Path) -> list[Played]:
    """Return the rounds in `path`, none if there is no such file.

    Exit with an error in one line if they are of another version.
    """
    rounds, own = [], code_version()
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if (version := row.pop("version")) != own:
                sys.exit(
                    f"error: {path} has rounds of version {version}, but this is version {own} of "
                    "the package, the drill, its job and torch: give --save another file"
                )
            plan, cost = row.pop("plan"), row.pop("cost")
            rounds.append(Played(plan=Plan(**plan), cost=Cost(**cost), **row))
        except (ValueError, KeyError, TypeError, AttributeError):
            sys.exit(f"error: line {number} of {path} is not a round: remove it")
    return rounds


def add(path: Path, played: Played) -> None:
    """Add a round to `path`. A file that does not exist yet is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"version": code_version()} | asdict(played)) + "\n")
