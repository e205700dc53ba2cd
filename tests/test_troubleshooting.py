"""Every message that a reader may search for has a heading in troubleshooting.md, and is real.

This file checks the messages at their source: in the installed torch, in the CUDA build if that is
installed, or in our own code.
"""

import ast
import mmap
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fences import pages
from harness import ROOT, run
from torch._C._distributed_c10d import _dump_fr_trace

import ddp_ref

TORCH = Path(torch.__file__).parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
HANGS = (ROOT / "docs" / "nccl-hangs.md").read_text()
FENCES = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADINGS = re.findall(r"^##+ (.+)$", FENCES.sub("", PAGE), re.MULTILINE)
QUOTED = [text for heading in HEADINGS for text in re.findall(r"`([^`]+)`", heading)]

# Messages, and the file of the installed torch that contains each. Every build has these files.
IN_TORCH = {
    "Address already in use": "distributed/elastic/utils/distributed.py",
    "EADDRINUSE": "lib/libtorch_cpu.so",
    "--local-rank": "distributed/launch.py",
    "client socket has timed out": "lib/libtorch_cpu.so",
    "Gloo connectFullMesh failed": "lib/libtorch_cpu.so",
    "No backend type associated with device type": "lib/libtorch_cpu.so",
    "Bus error": None,  # the operating system's name for the signal
    "Too many open files": "utils/data/dataloader.py",
    "received by PID": "distributed/elastic/multiprocessing/errors/__init__.py",
    "ChildFailedError": "distributed/elastic/multiprocessing/errors/__init__.py",
    "Failed to parse reply file": "distributed/elastic/multiprocessing/errors/__init__.py",
    "SIGABRT": None,  # also the operating system's
    "SIGSEGV": None,
    "Connection closed by peer": "lib/libtorch_cpu.so",
    "Timed out waiting": "lib/libtorch_cpu.so",
    "Expected to have finished reduction": "lib/libtorch_cpu.so",
    "Expected to mark a variable ready only once": "lib/libtorch_cpu.so",
    "marked as ready twice": "lib/libtorch_cpu.so",
    "modified by an inplace operation": "lib/libtorch_cpu.so",
    "Grad strides do not match bucket view strides": "lib/libtorch_cpu.so",
    "SyncBatchNorm layers only work with GPU modules": "nn/parallel/distributed.py",
    "Missing key(s) in state_dict": "nn/modules/module.py",
    "got signal: ": "distributed/elastic/multiprocessing/api.py",
    "Expected more than 1 value per channel": "nn/functional.py",
    "appears not to match sizes": "lib/libtorch_cpu.so",
    "DDP expects same model across all ranks": "lib/libtorch_cpu.so",
    "stream does not match": "lib/libtorch_cpu.so",
    "that doesn't match the size of optimizer's group": "optim/optimizer.py",
    "Tried to step": "optim/lr_scheduler.py",
    "default_collate: batch must contain": "utils/data/_utils/collate.py",
    "Unexpected bus error encountered in worker": "lib/libtorch_python.so",
    "TORCH_FR_BUFFER_SIZE": "lib/libtorch_cpu.so",
    "TORCH_FR_DUMP_TEMP_FILE": "lib/libtorch_cpu.so",
    "terminate called without an active exception": None,  # the C++ runtime's
}
# Only CUDA builds have these, in the libraries of torch, of NCCL and of the CUDA runtime. We found
# all by hand in torch 2.13.0 for CUDA 13, nvidia-nccl-cu13 2.29.7 and nvidia-cuda-runtime 13.0.96.
TORCH_CUDA, C10_CUDA = "torch/lib/libtorch_cuda.so", "torch/lib/libc10_cuda.so"
NCCL, RUNTIME = "nvidia/nccl/lib/libnccl.so.2", "nvidia/*/lib/libcudart.so.*"
IN_CUDA_BUILDS = {
    "Tensors must be CUDA and dense": TORCH_CUDA,
    "NCCL does not support all_reduce with sparse tensors": TORCH_CUDA,
    "CUDA out of memory": C10_CUDA,
    "Duplicate GPU detected": NCCL,
    "invalid device ordinal": RUNTIME,
    "device-side assert": RUNTIME,
    "unhandled system error": NCCL,
    "unhandled cuda error": NCCL,
    "Watchdog caught collective operation timeout": TORCH_CUDA,
    "WorkNCCL": TORCH_CUDA,
    "failure detected by watchdog at work sequence id": TORCH_CUDA,
    "last enqueued work": TORCH_CUDA,
    "last completed work": TORCH_CUDA,
    "Stack trace of the failed collective": TORCH_CUDA,
    "First PG on this rank to signal dumping": TORCH_CUDA,
    "Observed flight recorder dump signal from another rank via TCPStore": TORCH_CUDA,
    "Received a dump signal due to a collective timeout from": TORCH_CUDA,
    "Last enqueued NCCL work": TORCH_CUDA,
    "Some NCCL operations have failed or timed out": TORCH_CUDA,
    "To avoid data inconsistency, we are taking the entire process down": TORCH_CUDA,
    "TORCH_NCCL_DUMP_ON_TIMEOUT": TORCH_CUDA,
    "NCCL_P2P_DISABLE": NCCL,
    "NCCL_SHM_DISABLE": NCCL,
    "NCCL_IB_DISABLE": NCCL,
    "via P2P": NCCL,
    "via SHM": NCCL,
}
# CUDA builds since 2.14 have these of nccl2. We found all by hand in torch 2.14.1 for CUDA 13.
IN_NCCL2 = {
    "Operation timed out after": TORCH_CUDA,
    "Aborting process on rank": TORCH_CUDA,
    "nccl hit async error on rank": TORCH_CUDA,
}
OURS = [
    "did not arrive",
    "start one rank per GPU",
    "belong together",
    "one of several processes, but nothing says which rank it is",
    "belongs to job",
    "all ranks must make the same on_rank and rank_first calls",
    "another rank has died or left",
    "cannot use its process group",
    "is not finite",
    "all ranks must have the same",
    "differs between ranks",
    "this rank's loader ended after",
    "nothing records",
    "to unfreeze layers",
    "cannot tell how many samples a batch",
    "must be for rank",
    "is not a complete checkpoint",
    "cannot be pickled",
    "needs a store per attempt",
]
# No heading of their own: they are under another message's heading, or on the page about hangs.
WITHOUT_HEADING = {
    "marked as ready twice",
    "Unexpected bus error encountered in worker",
    "NCCL does not support all_reduce with sparse tensors",
    "terminate called without an active exception",
}


def in_file(path: Path, text: str) -> bool:
    """Return whether the file `path`, which may have hundreds of MB, contains `text`."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text.encode()) >= 0


def is_title(message: str) -> bool:
    """Return whether a heading of the page has `message` in backticks."""
    return any(message in text for text in QUOTED)


def test_every_message_is_in_the_docs_and_has_a_heading():
    texts = [page.read_text() for page in pages()]
    for message in [*IN_TORCH, *IN_CUDA_BUILDS, *IN_NCCL2, *OURS]:
        assert any(message in text for text in texts), message
        assert is_title(message) or message in HANGS or message in WITHOUT_HEADING, message


def test_every_message_that_has_a_heading_is_checked():
    """A heading that quotes a message must be in one of the lists, or Python's own."""
    # The first is Python's error for a variable that is not set, the second one of Python's files,
    # the third argparse's, and the fourth a file of Linux.
    of_python = {"KeyError: 'LOCAL_RANK'", "popen_fork.py", "ambiguous option", "ptrace_scope"}
    known = {*IN_TORCH, *IN_CUDA_BUILDS, *IN_NCCL2, *OURS, *of_python, "ddp_ref"}
    assert [text for text in QUOTED if not any(message in text for message in known)] == []


def test_the_installed_torch_has_its_messages():
    missing = [m for m, file in IN_TORCH.items() if file and not in_file(TORCH / file, m)]
    assert missing == []


def test_the_cuda_build_has_its_messages():
    has_nccl2 = torch.__version__ >= "2.14"  # compares versions, not letters
    messages = IN_CUDA_BUILDS | (IN_NCCL2 if has_nccl2 else {})
    installed = {message: list(TORCH.parent.glob(name)) for message, name in messages.items()}
    if not all(installed.values()):  # the fake GPU has torch's, but not NVIDIA's
        pytest.skip("only CUDA builds of torch, with NVIDIA's libraries, have these messages")
    missing = [m for m, files in installed.items() if not any(in_file(file, m) for file in files)]
    assert missing == []


def test_our_code_has_its_messages():
    """Each is in a string, or in a part of an f-string between two values."""
    files = Path(ddp_ref.__file__).parent.rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    texts = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    assert [message for message in OURS if not any(message in text for text in texts)] == []


def test_the_defaults_of_the_flight_recorder():
    """It is on by default, as the page says: it remembers 2,000 collectives."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2_100):
            dist.all_reduce(torch.ones(1))
        recorded = pickle.loads(_dump_fr_trace())
    finally:
        dist.destroy_process_group()
    (status,) = (s for s in recorded["pg_status"].values() if s["last_enqueued_collective"] > 2_000)
    assert len(recorded["entries"]) == 2_000
    assert status["last_completed_collective"] > 2_000  # a thread updates it a little later


# torchrun's heartbeat uses the store once per second at most. Here it always does, so that Ctrl-C
# finds it there.
INTERRUPTED = """
import os
import signal
import threading
from datetime import timedelta

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main

timer, holder = dynamic_rendezvous._PeriodicTimer, dynamic_rendezvous._BackendRendezvousStateHolder
dynamic_rendezvous._PeriodicTimer = lambda _, *args: timer(timedelta(0), *args)
holder.__init__.__defaults__ = (0,)  # for how long it would remember what it has read
threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
main(["--standalone", "--no-python", "sleep", "60"])
"""


def test_torchrun_aborts_if_ctrl_c_meets_its_heartbeat(tmp_path):
    """The page tells readers to ignore it. Most attempts abort, not all."""
    for _ in range(5):
        ended = run(sys.executable, "-c", INTERRUPTED, cwd=tmp_path)
        if ended.code == -6:
            break
    assert ended.code == -6 and "terminate called without an active exception" in ended.stderr
