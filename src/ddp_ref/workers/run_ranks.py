"""Run a function on several ranks of this host from a notebook, a test or a script."""

import atexit
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from tempfile import TemporaryFile
from typing import IO, Any

import torch.distributed as dist

from ..initialize import cleanup_ddp, wait_until_gloo_is_idle
from .process import Worker, run_all, worker_environment
from .serialization import dumps

HOST = "127.0.0.1"


def run_ranks(
    func: Callable[..., Any],
    /,
    *args: Any,
    nproc: int = 2,
    timeout: timedelta | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `func(*args, **kwargs)` on `nproc` new ranks of this host and wait for the results.

    Each rank is a process with torchrun's variables, so `initialize_ddp` and `env://` work in
    `func`. The ranks' output is printed when they have ended, in rank order. No rank is left
    running afterwards, even after an error or an interrupt.

    Args:
        func: Any function, even a lambda, a closure or one defined in a notebook.
        *args: Its arguments. A tensor on a GPU arrives on the rank's current CUDA device, which is
            the first one, or on the CPU where there is none.
        nproc: How many ranks to start.
        timeout: How long all of it may take (None: no limit).
        **kwargs: Its keyword arguments.

    Returns:
        What `func` returned on each rank, in rank order. Tensors keep their device and lose their
        graph and `.grad`. A view comes back as a copy of the part that it shows.

    Raises:
        BaseException: The first exception of a rank, in its own type, with the rank and its
            traceback as a note.
        RuntimeError: If a rank was killed or exited. It names the rank and the signal or code.
        TimeoutError: If ranks have not ended in time. It names them.
        TypeError: If `func`, an argument or a result cannot be pickled.
        ValueError: If `nproc` is not an integer of at least 1.
    """
    if type(nproc) is not int or nproc < 1:
        raise ValueError(f"nproc must be an integer of at least 1, not {nproc!r}")
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise TypeError(f"timeout must be a timedelta above 0, such as one minute, not {timeout!r}")
    packed = dumps("func or an argument", (_as_rank, func, args, kwargs))
    # This process hosts the store, on a free port, and the ranks join it as under torchrun. So
    # several runs at once do not clash.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        outputs = [stack.enter_context(TemporaryFile()) for _ in range(nproc)]
        stack.callback(_print, outputs)
        workers = []
        for rank, output in enumerate(outputs):
            environment = _rank_environment(rank, nproc, store.port)
            workers.append(Worker(f"rank {rank}", environment, "", output))
            stack.callback(workers[-1].kill)
        return run_all(workers, packed, timeout, leave=True)


def _as_rank(_device: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func` in the rank."""
    # A group that the function leaves open is closed at exit, after the result was sent.
    atexit.register(wait_until_gloo_is_idle)
    atexit.register(cleanup_ddp)
    return func(*args, **kwargs)


def _rank_environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """Return the variables of a rank under torchrun, and an encoding that `_print` reads."""
    variables = (
        f"RANK={rank} LOCAL_RANK={rank} ROLE_RANK={rank} GROUP_RANK=0 ROLE_NAME=default "
        f"WORLD_SIZE={nproc} LOCAL_WORLD_SIZE={nproc} ROLE_WORLD_SIZE={nproc} GROUP_WORLD_SIZE=1 "
        f"MASTER_ADDR={HOST} MASTER_PORT={port} TORCHELASTIC_RUN_ID=run_ranks "
        "TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 "
        "TORCHELASTIC_USE_AGENT_STORE=True PYTHONIOENCODING=utf-8"  # so rank 0 joins our store too
    )
    return worker_environment(nproc) | dict(item.split("=") for item in variables.split())


def _print(outputs: Iterable[IO[bytes]]) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        for rank, output in enumerate(outputs):
            output.seek(0)
            for line in output:
                text = line.decode(errors="replace").rstrip("\n")
                text = text.encode(encoding, "backslashreplace").decode(encoding)
                print(f"[rank {rank}] {text}", flush=True)
    except (OSError, ValueError) as error:  # a closed pipe must not cost the results
        warnings.warn(f"cannot print the output of the ranks: {error}", stacklevel=2)
