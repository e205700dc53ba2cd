"""Measure what ddp_ref costs, beside raw PyTorch and its peers: make bench

python benchmarks/bench.py                     all of them, on the terminal: half an hour
python benchmarks/bench.py waits steps         these
python benchmarks/bench.py waits --markdown docs/benchmarks.md

All variants take turns in one run, on an otherwise idle machine. The baseline is measured twice,
which shows how large a difference may be and still be noise.
"""

import importlib
import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from unittest.mock import patch

from page import machine, put_between, require_marks
from tables import markdown, marks

NAMES = "steps", "gathers", "saves", "waits", "finale"
ON_GPUS = "gpu"  # only if named: make gpu-report


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    names = f"of {', '.join(NAMES)}, {ON_GPUS}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names, default=NAMES)
    parser.add_argument("--rounds", type=int, help="how many (each benchmark's own number)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the tables there too")
    args = parser.parse_args()
    require_marks(parser, args.markdown, *map(marks, args.names))
    print(f"on {machine(['torch'])}")
    for name in args.names:
        benchmark = importlib.import_module(name)
        about = (benchmark.__doc__ or "").strip()
        print(f"\n## {name}: {about.splitlines()[0]}\n", flush=True)
        rounds = args.rounds or benchmark.ROUNDS
        hidden = {} if name == ON_GPUS else {"CUDA_VISIBLE_DEVICES": ""}  # so figures compare
        with patch.dict(os.environ, hidden):
            tables = [*map(markdown, benchmark.measure(rounds))]
        print(*tables, sep="\n\n", flush=True)
        if args.markdown:
            where = machine(["torch", *getattr(benchmark, "PACKAGES", [])])
            where = f"`bench.py {name} --rounds={rounds}` on {where}."
            put_between(args.markdown, *marks(name), "\n\n".join([about, *tables, where]))


if __name__ == "__main__":
    main()
