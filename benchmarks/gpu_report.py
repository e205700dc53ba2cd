"""Test and measure this project on the GPUs of this machine, and write the report: make gpu-report

It uses the Python and the torch that are there, from 2.8 on, and installs nothing. What needs a
package that is missing is left out, and the report says so. It ends with exit code 1 if a part
failed, and takes less than 10 minutes.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- begin of the report -->", "<!-- end of the report -->"
# Nothing of ours that needs more packages: neither pyproject.toml's options nor conftest.py.
PYTEST = [
    "-m",
    "pytest",
    "-c",
    os.devnull,
    "--noconftest",
    "-q",
    "-m",
    "gpu",
    "-p",
    "no:cacheprovider",
]


class Part(NamedTuple):
    title: str
    needs: tuple[str, ...]  # packages besides torch
    timeout: int  # seconds
    arguments: list[str]  # of Python
    lines: int = 0  # how many of the output's last lines are shown; 0: all


def parts(gpus: int, rounds: int) -> list[Part]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    tests = str(ROOT / "tests" / "test_gpu.py")
    return [
        Part("Doctor", ("cloudpickle",), 60, ["-m", "ddp_ref", "doctor"]),
        Part("Waits", (), 60, [*torchrun, str(ROOT / "benchmarks" / "sync_check.py")], 1),
        Part("Tests", ("pytest", "psutil", "cloudpickle", "sklearn"), 260, [*PYTEST, tests], 1),
        Part(
            "Speed",
            ("numpy", "cloudpickle"),
            200,
            [str(ROOT / "benchmarks" / "bench.py"), "gpu", f"--rounds={rounds}"],
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="of the report (default: all)")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu.md", help="of the report")
    parser.add_argument("--rounds", type=int, default=100, help="of the benchmark (100)")
    args = parser.parse_args()
    head, found, rest = args.page.read_text(encoding="utf-8").partition(BEGIN)
    _, found_end, tail = rest.partition(END)
    if not (found and found_end):
        parser.error(f"{args.page} lacks the lines {BEGIN} and {END}")
    gpus = torch.cuda.device_count()
    if not gpus:
        parser.error("torch sees no CUDA device: run this on a machine with a GPU")
    report, failed = [machine(gpus)], False
    for part in parts(gpus, args.rounds):
        if args.parts and part.title not in args.parts:
            continue
        print(f"{part.title} ...", flush=True)
        text, code = run(part)
        failed = failed or code != 0
        report.append(f"### {part.title}\n\n{text}")
        print(text, flush=True)
    text = "\n\n".join(report)
    args.page.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}", encoding="utf-8")
    print(f"written into {args.page}")
    return int(failed)


def run(part: Part) -> tuple[str, int]:
    """Return what a part shows, as Markdown, and its exit code."""
    if missing := [name for name in part.needs if find_spec(name) is None]:
        return f"Left out, because this Python has no {', '.join(missing)}.", 0
    folders = [ROOT / "src", ROOT, ROOT / "tests", os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    start = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, *part.arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=part.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"Failed: it did not end within {part.timeout} s.", 1
    output = ended.stdout.strip() if ended.returncode == 0 else ended.stdout + ended.stderr[-2000:]
    shown = output.splitlines()[-part.lines :]
    result = "passed" if ended.returncode == 0 else f"failed with exit code {ended.returncode}"
    text = f"{time.monotonic() - start:.0f} s, {result}."
    is_markdown = any(line.startswith("|") for line in shown)
    return "\n".join(
        [text, "", *(shown if is_markdown else map("    {}".format, shown))]
    ), ended.returncode


def machine(gpus: int) -> str:
    names = sorted({torch.cuda.get_device_name(index) for index in range(gpus)})
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return (
        f"{gpus} x {', '.join(names)} with {memory:.0f} GiB, {os.cpu_count()} CPU cores, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, {date.today()}."
    )


if __name__ == "__main__":
    sys.exit(main())
