"""Run a function on several ranks of this host: from a notebook, a test, a script, no launcher."""

import atexit
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from tempfile import TemporaryFile
from typing import IO, Any

import torch.distributed as dist

from .initialize import cleanup_ddp, linger
from .pickling import dumps
from .worker import Talk, Worker, run_all, worker_environment

HOST = "127.0.0.1"


def run_ranks(
    func: Callable[..., Any],
    /,
    *args: Any,
    nproc: int = 2,
    timeout: timedelta | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `func(*args, **kwargs)` on `nproc` new ranks of this host; return the results in order.

    Each rank is a process with torchrun's variables, so `initialize_ddp` and `env://` work in
    `func`, which may be a lambda, a closure or a notebook's. What the ranks wrote is printed when
    they have ended, in rank order. A tensor comes back as it is, but
    without its graph and `.grad`; views are copied.
    Raises the first failure in its own type, the rank and its traceback as a note; RuntimeError for
    a rank that was killed or exited; TimeoutError past `timeout` (timedelta, None: no limit);
    TypeError where `func`, an argument or a result does not pickle. No rank is left then, nor
    after an interrupt.
    """
    if type(nproc) is not int or nproc < 1:
        raise ValueError(f"nproc must be an integer of at least 1, not {nproc!r}")
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise TypeError(f"timeout must be a timedelta above 0, such as one minute, not {timeout!r}")
    packed = dumps("func or an argument", (_as_rank, func, args, kwargs))
    # Hosted here, on a port the system picks: the ranks join as under torchrun, and no runs clash.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)

    def take_part(worker: Worker) -> Talk:
        result = yield from worker.call(packed)
        yield from worker.leave()
        return result

    with ExitStack() as stack:
        outputs = [stack.enter_context(TemporaryFile()) for _ in range(nproc)]
        stack.callback(_print_all, outputs)
        workers = []
        for rank, output in enumerate(outputs):
            environment = _rank_environment(rank, nproc, store.port)
            workers.append(Worker(f"rank {rank}", environment, output))
            stack.callback(workers[-1].end)
        return run_all(workers, take_part, timeout)


def _as_rank(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call `func` in the rank."""
    # Once the result is sent: a group that it leaves open is closed, one that it closed is quiet.
    atexit.register(linger)
    atexit.register(cleanup_ddp)
    return func(*args, **kwargs)


def _rank_environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for a rank of `nproc` on one host, and an encoding we can read."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), nproc)
    rest = {
        "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "run_ranks",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is there: rank 0 need not host it
        "PYTHONIOENCODING": "utf-8",
    }
    launch = {name: str(value) for name, value in (own | sizes | rest).items()}
    return worker_environment(nproc) | launch


def _print_all(outputs: Iterable[IO[bytes]]) -> None:
    try:
        _print(outputs)
    except (OSError, ValueError) as error:  # a closed pipe must not cost the results
        warnings.warn(f"what the ranks wrote cannot be printed: {error}", stacklevel=2)


def _print(outputs: Iterable[IO[bytes]]) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    for rank, output in enumerate(outputs):
        output.seek(0)
        for line in output:
            text = line.decode(errors="replace").rstrip("\n")
            text = text.encode(encoding, "backslashreplace").decode(encoding)
            print(f"[rank {rank}] {text}", flush=True)
