"""Run many checks in one launch of real ranks.

Starting ranks takes seconds, but a check takes milliseconds. A script defines `check_...`
functions, which every rank calls in the same order, and ends with `run_checks(globals())`. A test
asks for the result of one check, by its name, with `check_passes`.
"""

import faulthandler
import functools
import json
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from harness import run, torchrun

HERE = Path(__file__).parent
TIMEOUT = timedelta(seconds=60)
STUCK = 50  # seconds after which a rank prints its stack; less than its peers' timeout


def run_checks(namespace: dict[str, Any]) -> None:
    """Call every check on this rank and write the results to a file; stop at the first failure."""
    import torch.distributed as dist

    from ddp_ref.initialize import initialize_ddp

    initialize_ddp(TIMEOUT, use_distributed=True)
    results = Path(f"rank{dist.get_rank()}.json")
    done: dict[str, str] = {}
    for name in [name for name in namespace if name.startswith("check_")]:
        faulthandler.dump_traceback_later(STUCK)
        try:
            namespace[name]()
            done[name] = "passed"
        except BaseException:  # noqa: BLE001 - the test that asks for it reports it
            done[name] = traceback.format_exc()
        results.write_text(json.dumps(done))
        if done[name] != "passed":
            os._exit(1)  # the other ranks would wait for this one: make them fail too
        dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def checks(script: str) -> list[str]:
    """Return the names of the checks in `script`, without running it."""
    source = (HERE / script).read_text()
    return [line[4:].split("(")[0] for line in source.splitlines() if line.startswith("def check_")]


def on_ranks(script: str, world: int, *flags: str, fresh: bool = False) -> Any:
    """Return the parameter `launch` of a test called test_on_ranks, which calls `check_passes`.

    All tests of one launch run on the same pytest-xdist worker (see the project's conftest.py).
    Unless the ranks are `fresh`, they share a hash seed, so a set has the same order in all of
    them.
    """
    return pytest.param((script, world, fresh, *flags), id=str(world))


def check_passes(launch: tuple[Any, ...], name: str) -> None:
    """Fail unless the check passed on every rank. The first call for a launch runs all checks."""
    results = [done.get(name, "was not reached") for done in _results(*launch)]
    texts = [f"rank {rank} of {launch[1]}: {result}" for rank, result in enumerate(results)]
    assert set(results) == {"passed"}, "\n".join([name, *texts])


@functools.cache
def _results(script: str, world: int, fresh: bool, *flags: str) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        ended = run(*torchrun(world, HERE / script, *flags), cwd=Path(folder), fresh=fresh)
        files = [Path(folder, f"rank{rank}.json") for rank in range(world)]
        assert all(file.exists() for file in files), ended.stderr
        results = [json.loads(file.read_text()) for file in files]
    for done in results:
        done.update({name: text + ended.stderr for name, text in done.items() if text != "passed"})
    return results


def raised(kind: type[BaseException], call: Callable[..., object], *args: object) -> BaseException:
    """Return the exception of exactly this type that the call raises; fail if it raises none."""
    try:
        call(*args)
    except BaseException as error:  # noqa: BLE001 - returned
        assert type(error) is kind, f"{kind} was awaited"
        return error
    raise AssertionError(f"{call} raised nothing, {kind} was awaited")
