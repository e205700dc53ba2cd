"""Measure what ddp_ref costs, beside raw PyTorch and its peers: make bench

python benchmarks/bench.py                     all of them, on the terminal: half an hour
python benchmarks/bench.py waits steps         these
python benchmarks/bench.py waits --markdown docs/benchmarks.md

All variants take turns in one run, on an otherwise idle machine. The baseline is measured twice,
which shows how large a difference may be and still be noise.
"""

import argparse
import importlib
import os
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from page import machine, require_marks, warn_if_busy
from tables import PACKAGES, markdown, marks, write_section

NAMES = "steps", "gathers", "saves", "waits", "finale"
ON_GPUS = "gpu"  # only if named: make gpu-report


def main() -> None:
    args = parse()
    print(f"on {machine(PACKAGES)}")
    warn_if_busy()
    for name in args.names:
        hidden = {} if name == ON_GPUS else {"CUDA_VISIBLE_DEVICES": ""}  # so figures compare
        with patch.dict(os.environ, hidden):
            run(importlib.import_module(name), args.rounds, args.markdown)


def parse() -> argparse.Namespace:
    known = *NAMES, ON_GPUS
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--rounds", type=int, help="how many (each benchmark's own number)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the tables there too")
    args = parser.parse_args()
    if unknown := ", ".join(sorted(set(args.names) - set(known))):
        parser.error(f"there is no benchmark {unknown}: choose from {', '.join(known)}")
    args.names = args.names or NAMES
    require_marks(parser, args.markdown, *map(marks, args.names))
    return args


def run(benchmark: ModuleType, rounds: int | None, page: Path | None) -> None:
    """Measure, print the tables, and write them into `page`."""
    name, about = benchmark.__name__, benchmark.__doc__ or ""
    print(f"\n## {name}: {about.strip().splitlines()[0]}\n", flush=True)
    rounds = rounds or benchmark.ROUNDS
    tables = benchmark.measure(rounds)
    print("\n\n".join(map(markdown, tables)), flush=True)
    if page and tables:
        write_section(page, name, about.strip(), tables, rounds)


if __name__ == "__main__":
    main()
