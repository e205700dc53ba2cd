"""The contract of on_rank and rank_first: on real ranks, in one process, and at decoration."""

import functools
import inspect
import os
import random
import sys
import time
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import Running, free_port, run
from rank_checks import check_passes, checks, on_ranks

from ddp_ref import barrier, broadcast_object, cleanup_ddp, gather_objects, reduce_sum, run_ranks
from ddp_ref.decorators import on_rank, rank_first

SCRIPT = "on_rank_checks.py"


@pytest.mark.parametrize("name", checks(SCRIPT))
@pytest.mark.parametrize(
    "launch", [on_ranks(SCRIPT, 2, "--foreign"), on_ranks(SCRIPT, 3, fresh=True)]
)
def test_on_ranks(name, launch):
    check_passes(launch, name)


def test_a_group_that_other_code_opens_again_starts_anew(tmp_path):
    """torchrun's store outlives the group. The fake backend only opens: gloo would not, again."""

    def open_twice():
        import torch.testing._internal.distributed.fake_pg  # noqa: F401 - it registers the backend

        rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        for name in "ab":
            dist.init_process_group("fake", store=store, rank=rank, world_size=2)
            on_rank(0)(lambda name=name: (time.sleep(0.2), (tmp_path / name).touch()))()
            assert (tmp_path / name).exists()
            dist.destroy_process_group()

    run_ranks(open_twice, timeout=timedelta(minutes=1))


OTHERS = """
import time
import torch.distributed as dist
import torch.multiprocessing as mp
from ddp_ref import on_rank

def train(rank, port):
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    on_rank(0)(time.sleep)(1)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, (__import__("sys").argv[1],), 2)
"""


def test_the_rank_with_the_store_of_other_code_waits_for_those_that_still_read(tmp_path):
    (tmp_path / "train.py").write_text(OTHERS)
    ended = run(sys.executable, "train.py", free_port(), cwd=tmp_path, timeout=60)
    assert ended.code == 0, ended.stderr


def test_alone_on_rank_just_calls_the_function(alone):
    class Local(Exception):
        pass

    @on_rank(0, True, broadcast=True, max_wait=timedelta(seconds=1))
    def double(x, *, plus=0):
        return 2 * x + plus

    @on_rank(0)
    def fail():
        raise Local("here")

    assert (double.__name__, str(inspect.signature(double))) == ("double", "(x, *, plus=0)")
    assert double(3, plus=1) == 7
    assert on_rank([0])(lambda: on_rank(0)(lambda: "inner")())() == "inner"
    with pytest.raises(Local), rank_first():
        assert double(1) == 2
        raise Local
    with pytest.raises(Local) as caught:
        fail()
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(ValueError, match="0 to 0"):
        on_rank(1)(lambda: None)()


def generator():
    yield 1


async def coroutine():
    return 1


async def async_generator():
    yield 1


class Job:
    def __call__(self):
        yield


@pytest.mark.parametrize(
    "func", [generator, coroutine, async_generator, Job(), functools.partial(coroutine)]
)
def test_a_function_whose_body_runs_after_the_call_is_refused(func):
    name = getattr(func, "__name__", type(func).__name__)
    with pytest.raises(TypeError, match=f"cannot wrap the .* function .*{name}"):
        on_rank(0)(func)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"rank": None}, TypeError, "on_rank takes a rank"),
        ({"rank": [0, "1"]}, TypeError, "on_rank takes a rank"),
        ({"rank": print}, TypeError, "on_rank takes a rank"),  # without parentheses
        # A node without the listed local rank would skip the barrier that the others wait at.
        ({"rank": 0, "barrier": True, "local": True}, ValueError, "choose one"),
        ({"rank": 0, "max_wait": timedelta(0)}, ValueError, "above 0"),
        ({"rank": 0}, TypeError, "below @classmethod"),
    ],
)
def test_a_wrong_decoration_is_refused(options, kind, says):
    with pytest.raises(kind, match=says):
        on_rank(**options)(staticmethod(lambda: None))


def test_a_process_forked_from_a_rank_cannot_use_its_group_or_close_it():
    """It shares the rank's sockets, so a call would wait until the timeout."""

    def work():
        dist.init_process_group("gloo")  # ddp_ref has no record of it before the first call
        calls = [on_rank(0, broadcast=True)(lambda: 1), barrier, lambda: broadcast_object(1)]
        for call in [*calls, lambda: reduce_sum({"x": 1.0}), lambda: gather_objects(1)]:
            in_a_fork = {"num_workers": 1, "timeout": 30, "collate_fn": lambda _, call=call: call()}
            with pytest.raises(RuntimeError, match=r"a fork of rank .* call this in the rank"):
                next(iter(torch.utils.data.DataLoader(range(2), **in_a_fork)))
            call()
        if not (pid := os.fork()):
            cleanup_ddp()
            os._exit(0 if dist.is_initialized() else 1)
        return os.waitpid(pid, 0)[1], reduce_sum({"ranks": 1.0})["ranks"]

    assert run_ranks(work, timeout=timedelta(seconds=60)) == [(0, 2.0)] * 2


LOCAL = """
import os, time
from datetime import timedelta
from pathlib import Path
from ddp_ref import cleanup_ddp, gather_objects, initialize_ddp, on_rank, rank_first

info = initialize_ddp(timedelta(seconds=60))
node = int(os.environ["SLURM_NODEID"])

def where():
    return info.rank, info.local_rank

def fail_on_node_1():
    if node == 1:
        raise ValueError("only node 1")
    return "fine"

# Each node's own local rank 0 does the work, and its node gets the result.
assert on_rank(0, local=True, broadcast=True)(where)() == (node, 0)
assert on_rank(0, local=True)(where)() == ((node, 0) if info.local_rank == 0 else None)

# A node without a local rank 2 has nothing to do, and stays in step with the others.
result = on_rank(2, local=True, broadcast=True)(where)()
assert (result is not None) == (node == 0), result

# An exception is raised on the ranks of its node alone.
try:
    assert on_rank(0, local=True, broadcast=True)(fail_on_node_1)() == "fine" and node != 1
except ValueError as error:
    assert node == 1 and str(error) == "only node 1"

# Calls inside a body exchange nothing, even if the node has one rank, or none that does the work.
on_rank(0, local=True)(lambda: on_rank(0)(where)())()
with rank_first(1, local=True):
    on_rank(0)(where)()

# A node does not wait for the work of another one.
def work_until(file):
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)

left = Path("node 0 has left")
on_rank(0, local=True)(lambda: work_until(left) if node == 1 else None)()
if node == 0:
    left.touch()
assert left.exists() or node == 2  # so every rank of node 1 has waited for its node's work

with rank_first(0, local=True):
    started = time.monotonic()
    time.sleep(0.3)
first = gather_objects(started, to_all=True)[node]
assert info.local_rank == 0 or started > first + 0.29

assert on_rank(0, broadcast=True)(where)() == (0, 0)  # all ranks are still in the same call
for wrong in (3, -1):
    try:
        on_rank(wrong, local=True)(where)()
    except ValueError as error:
        assert f"the local ranks are 0 to 2, not {wrong}" in str(error)
    else:
        raise AssertionError

# A node may make a local call that the others leave out.
if node == 1:
    assert on_rank(0, local=True, broadcast=True)(where)() == (node, 0)
assert on_rank(0, broadcast=True)(where)() == (0, 0)
cleanup_ddp()
"""


def test_local_ranks(tmp_path):
    """Three nodes of a Slurm step, in cyclic placement, with three tasks, two tasks and one."""
    nodes, local_ranks = [0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 1, 2]
    step = {
        "SLURM_JOB_ID": str(random.SystemRandom().randrange(10**6)),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost,other,third",
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_STEP_TASKS_PER_NODE": "3,2,1",
    }
    (tmp_path / "local.py").write_text(LOCAL)
    with ExitStack() as stack:
        tasks = []
        for rank, (node, local_rank) in enumerate(zip(nodes, local_ranks, strict=True)):
            own = {"PROCID": rank, "NODEID": node, "LOCALID": local_rank}
            env = step | {f"SLURM_{name}": str(value) for name, value in own.items()}
            task = Running(sys.executable, "local.py", cwd=tmp_path, env=env)
            tasks.append(stack.enter_context(task))
        results = [task.wait(90) for task in tasks]
    assert [result.code for result in results] == [0] * 6, results
