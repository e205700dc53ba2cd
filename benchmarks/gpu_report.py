"""Test and measure this project on this machine's GPUs, and write a report into docs/gpu.md.

`make gpu-report` runs it in less than 10 minutes. It uses the installed Python and PyTorch (2.8 or
later) and installs nothing. The exit code is 1 if a part fails.
"""

import os
import platform
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import suppress
from datetime import date
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from page import put_between, require_marks

ROOT = Path(__file__).resolve().parent.parent
MARKS = "<!-- begin of the report -->", "<!-- end of the report -->"
# Without our pytest options and conftest.py, because they need packages that may be missing.
PYTEST = (
    f"-m pytest -c {os.devnull} --noconftest -p no:cacheprovider -q -rf --tb=short -m gpu".split()
)
GPU_TESTS, SANITY = (str(ROOT / "tests" / f"test_{name}.py") for name in ("gpu", "sanity"))
SHOWN_OF_A_FAILURE = 60  # lines
ENDING = 5  # seconds that a part gets to end its ranks when its time is up


class Part(NamedTuple):
    title: str
    timeout: int  # seconds; with ENDING for each, they add up to less than 10 minutes
    arguments: list[str]  # of the command line, after `python`
    most_gpus: int | None = None  # how many GPUs it may see; None: all


def parts(rounds: int) -> list[Part]:
    tests = [*PYTEST, GPU_TESTS, SANITY, "-k", "not (test_gpu and test_on_ranks)"]
    tests += ["-n", "3"] if find_spec("xdist") else []
    on_ranks = [*PYTEST, GPU_TESTS, "-k", "test_on_ranks"]
    speed = [str(ROOT / "benchmarks" / "bench.py"), "gpu", f"--rounds={rounds}"]
    return [
        Part("Doctor", 95, [str(ROOT / "scripts" / "doctor.py")]),
        # On two GPUs, because more processes take longer to start.
        Part("Tests", 125, tests, most_gpus=2),
        Part("Ranks", 90, on_ranks),
        Part("Speed", 260, speed),
    ]


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="such as Doctor (default: all)")
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs" / "gpu.md", help="where to write the report"
    )
    parser.add_argument("--rounds", type=int, default=60, help="of Speed (default: 60)")
    args = parser.parse_args()
    require_marks(parser, args.page, MARKS)
    if not torch.cuda.device_count():
        parser.error("no CUDA device is visible to PyTorch: run this where there is one")
    known = parts(args.rounds)
    if unknown := {*args.parts} - {part.title for part in known}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    report, failed = [machine()], False
    for part in known:
        if args.parts and part.title not in args.parts:
            continue
        print(f"{part.title} ...", flush=True)
        text, code = run(part)
        failed = failed or code != 0
        report.append(f"### {part.title}\n\n{text}")
        print(text, flush=True)
        put_between(args.page, *MARKS, "\n\n".join(report))
    print(f"wrote the report into {args.page}")
    return int(failed)


def run(part: Part) -> tuple[str, int]:
    """Run one part; return its output as Markdown, and its exit code."""
    start = time.monotonic()
    every = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or every).split(",")[: part.most_gpus]
    folders = [ROOT / "src", ROOT, ROOT / "tests", os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(map(str, folders))
    # Some parts write files. The output goes to one too: a rank that outlives its part would keep
    # a pipe open.
    with TemporaryDirectory() as folder, Path(folder, "output").open("w+") as file:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ",".join(gpus)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(part.timeout)
            result = "passed" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            result = f"failed: not finished after {part.timeout} s"
            process.send_signal(signal.SIGINT)  # pytest then ends the ranks that it has started
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING)
        finally:
            process.kill()
            process.wait()
        file.seek(0)
        lines = file.read().strip().splitlines()
    failed = result != "passed"
    shown = list(dropwhile(lambda line: not line.startswith("|"), lines))  # tables and notes
    if failed or not shown:
        shown = [f"    {line}" for line in lines[-(SHOWN_OF_A_FAILURE if failed else 1) :]]
    return "\n".join([f"{time.monotonic() - start:.0f} s, {result}.", "", *shown]), int(failed)


def machine() -> str:
    """Return a line about this machine: its GPUs, and the versions of what runs on them."""
    gpus = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(gpus)}))
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return (
        f"{gpus} x {names} with {memory:.0f} GiB, {os.cpu_count()} CPU cores, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, {date.today()}."
    )


if __name__ == "__main__":
    sys.exit(main())
