"""ParallelExecutor, parallelize_on_gpus: a result per device, workers reused and never leaked."""

import functools
import gc
import operator
import os
import signal
import sys
import threading
import time
import warnings
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch
from harness import Running, run, wait_until

from ddp_ref import ParallelExecutor, parallel_on_all_devices, parallelize_on_gpus
from ddp_ref.workers import process

Point = namedtuple("Point", "x y")
CPU = torch.device("cpu")
UNUSUAL = [torch.uint16, torch.float8_e4m3fn, torch.complex64]  # plain pickle cannot send the first


def _executor(*args, **kwargs) -> ParallelExecutor:
    """Return an executor without the warning about CPU workers, which has a test of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ParallelExecutor(*args, **kwargs)


def _pids(executor: ParallelExecutor) -> list[int]:
    return executor.run(lambda device: os.getpid())


@pytest.fixture(scope="module")
def two():
    """Return an executor with two CPU workers. The tests that kill no worker share it."""
    with pytest.MonkeyPatch.context() as patch, _executor_without_cuda(patch) as executor:
        _pids(executor)  # start the workers now: no_leaks fails a test that starts them
        yield executor


def _executor_without_cuda(patch: pytest.MonkeyPatch) -> ParallelExecutor:
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    return _executor(2)


def test_results_come_back_intact_and_in_device_order(two):
    def work(device, data, *, scale):
        weight = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
        whole = torch.zeros(6)
        made = weight * 2
        made.sum().backward()
        return {
            "made": made,
            "worker": os.environ.get("OMP_NUM_THREADS"),
            "nested": [Point((data.to(device) * scale, weight), {"set": {1}}), None],
            "array": np.arange(6).reshape(2, 3),
            "dtypes": [torch.ones(2).to(dtype) for dtype in UNUSUAL],
            "shared": [whole, whole.view(2, 3)],
        }

    results = two.run(work, torch.tensor([1, 2, 3]), scale=2)
    assert len(results) == len(two.devices) == 2
    for result in results:
        (data, weight), rest = result["nested"][0]
        assert type(result["nested"][0]) is Point and rest == {"set": {1}}
        assert data.dtype == torch.int64 and data.tolist() == [2, 4, 6]
        assert (weight.dtype, weight.shape, weight.requires_grad) == (torch.bfloat16, (2, 3), True)
        assert weight.grad is None and result["made"].grad_fn is None
        assert result["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert [tensor.dtype for tensor in result["dtypes"]] == UNUSUAL
        whole, matrix = result["shared"]
        whole[5] = 1
        assert matrix[1, 2] == 1
    pids = _pids(two)
    assert len({*pids, os.getpid()}) == 3


class Model:
    def method(self, device, data):
        return str(device), data


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (lambda device, data: (str(device), data), (1,), {}),
        (lambda device, data: (str(device), data), (), {"data": 1}),
        (lambda data, device: (str(device), data), (1,), {}),
        (lambda data, device, more=0: (str(device), data + more), (0, 1), {}),
        (lambda data, *, device: (str(device), data), (1,), {}),
        (lambda device, *data: (str(device), *data), (1,), {}),
        (lambda *data, **named: (str(named["device"]), *data), (1,), {}),
        (lambda device, /, data: (str(device), data), (1,), {}),
        (Model().method, (1,), {}),
        (functools.partial(lambda device, one, two: (str(device), one * two), two=1), (1,), {}),
    ],
)
def test_the_device_fills_the_parameter_named_device(two, func, args, kwargs):
    assert two.run(func, *args, **kwargs) == [("cpu", 1)] * 2


def test_without_pass_device_the_function_gets_its_own_arguments_only():
    with _executor(1, pass_device=False) as executor:
        assert executor.run(operator.add, 1, 2) == [3]
        assert executor.run(lambda device: device, device="mine") == ["mine"]


class TwoArguments(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.fixture
def wait_for_both(monkeypatch):
    """Let a worker that fails later than the other one live on, however slow the machine is."""
    monkeypatch.setattr(process, "FAILURE_WINDOW", 20)


@pytest.mark.usefixtures("wait_for_both")
def test_an_exception_keeps_its_type_and_the_workers_live_on(two):
    class Local(ValueError):
        pass

    def fail(device, kind):
        if kind == "two arguments":
            raise TwoArguments(1, 2)
        raise Local("said so")

    before = _pids(two)
    with pytest.raises(Local, match="said so") as caught:
        two.run(fail, "local")
    (note,) = caught.value.__notes__
    assert note.startswith("raised on worker ") and 'raise Local("said so")' in note
    with pytest.raises(RuntimeError, match="TwoArguments: 1 and 2"):
        two.run(fail, "two arguments")
    with pytest.raises(TypeError, match="the result cannot be pickled"):
        two.run(lambda device: (n for n in ()))
    with pytest.raises(TypeError, match="func or an argument cannot be pickled"):
        two.run(lambda device, data: data, (n for n in ()))
    with pytest.raises(TypeError, match="device is passed by the executor"):
        two.run(lambda device: device, device=CPU)
    with pytest.raises(RuntimeError, match=r"worker \d on cpu exited with code 5, by sys.exit"):
        two.run(lambda device: sys.exit(5))
    assert _pids(two) == before


def test_an_executor_that_is_dropped_leaves_no_process():
    executor = _executor(1)
    (pid,) = _pids(executor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # subprocess warns that it still runs
        del executor
        gc.collect()
    with suppress(ChildProcessError):  # Popen may already have collected its exit code
        os.waitpid(pid, 0)


def test_a_dead_worker_is_named_and_replaced(tmp_path):
    def die(device, kind):
        marker = tmp_path / kind
        marker.with_name(f"{kind}-{os.getpid()}").touch()
        if len(list(tmp_path.glob(f"{kind}-*"))) == 2:  # this is the second worker to come here
            os.kill(os.getpid(), signal.SIGKILL) if kind == "SIGKILL" else os._exit(3)
        os.system("sleep 1000")  # a child that must not be left behind either

    ends = {
        "SIGKILL": "was killed by SIGKILL: did it run out of memory",
        "exit": "exited with code 3: look at its output",
    }
    with _executor(2) as executor:
        for kind, end in ends.items():
            with pytest.raises(RuntimeError, match=rf"worker \d on [a-z0-9:]+ {end}"):
                executor.run(die, kind)
            assert executor.run(lambda device, data: data, 1) == [1, 1]
        first, second = _pids(executor)
        os.kill(first, signal.SIGKILL)  # between two calls
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        again = _pids(executor)
        assert again[0] != first and again[1] == second


@pytest.mark.parametrize("num_gpus", [0, -1, 1.5, "2", print])  # the last: without parentheses
def test_a_bad_number_of_gpus_is_refused(num_gpus):
    with pytest.raises(ValueError, match="num_gpus must be None or an integer of at least 1"):
        ParallelExecutor(num_gpus)
    with pytest.raises(ValueError, match="num_gpus must be None or an integer of at least 1"):
        parallelize_on_gpus(num_gpus)


@pytest.mark.parametrize("num_gpus", [None, 3])
def test_without_cuda_one_warning_says_what_runs_instead(num_gpus):
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    workers = num_gpus or min(2, cores or 1)
    with pytest.warns(UserWarning) as caught, ParallelExecutor(num_gpus) as executor:
        assert executor.devices == [CPU] * workers
    (warning,) = caught
    assert str(warning.message) == f"no CUDA device is visible: {workers} CPU workers instead"


def test_data_parallel_runs_the_whole_batch_without_cuda():
    @parallel_on_all_devices
    def forward(chunk, factor=1):
        """Say what it does."""
        return chunk * factor

    batch = torch.randn(8, 3)
    with pytest.warns(UserWarning, match="the whole batch runs on the CPU"):
        assert torch.equal(forward(batch, factor=2), batch * 2)
    assert (forward.__name__, forward.__doc__) == ("forward", "Say what it does.")


def test_data_parallel_takes_a_module_and_a_function(monkeypatch):
    """A module cannot be another module's `forward`. DataParallel is replaced: it needs GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.nn, "DataParallel", lambda module: module)
    linear, batch = torch.nn.Linear(3, 2), torch.randn(8, 3)
    for func in (linear, lambda chunk: linear(chunk)):
        assert torch.equal(parallel_on_all_devices(func)(batch), linear(batch))


DOCUMENTED = """
import multiprocessing, torch
from ddp_ref import ParallelExecutor, parallelize_on_gpus

print("the script runs")

@parallelize_on_gpus()
def process_on_gpu(device, data):
    return data.to(device) * 2

print(process_on_gpu(torch.tensor([1, 2, 3])))

@parallelize_on_gpus(num_gpus=2)
def another_gpu_function(device, x, y):
    return (x + y).to(device)

print(another_gpu_function(torch.tensor([1, 2]), y=torch.tensor([3, 4])))

def heavy_computation(device, data):
    data = data.to(device)
    result = data * 2
    return result

class Wrong(Exception):
    pass

def fail(device):
    raise Wrong

with ParallelExecutor(num_gpus=2) as executor:
    print(executor.run(heavy_computation, torch.tensor([1, 2, 3])))
    try:
        executor.run(fail)
    except Wrong:
        print("Wrong is Wrong")
print(multiprocessing.get_start_method(allow_none=True))
"""
SHOWN = """the script runs
[tensor([2, 4, 6]), tensor([2, 4, 6])]
[tensor([4, 6]), tensor([4, 6])]
[tensor([2, 4, 6]), tensor([2, 4, 6])]
Wrong is Wrong
None
"""


def test_the_documented_examples_run_in_a_script_without_a_guard(tmp_path):
    (tmp_path / "script.py").write_text(DOCUMENTED)
    result = run(sys.executable, "script.py", cwd=tmp_path)
    assert (result.stdout, result.code) == (SHOWN, 0), result.stderr
    assert result.stderr.count("Warning") == result.stderr.count("no CUDA device is visible") == 2


BUSY = """
import os, sys, time
from pathlib import Path
from ddp_ref import ParallelExecutor

def work(device):
    Path(f"ready-{os.getpid()}").touch()
    os.system("sleep 1000")

executor = ParallelExecutor(2)
try:
    executor.run(work)
except KeyboardInterrupt:
    print("felt", executor.run(lambda device: "again"))
    if sys.argv[1] == "killed":
        time.sleep(1000)  # with idle workers
"""


@pytest.mark.parametrize("end", ["exit", "killed"])
def test_an_executor_works_on_after_an_interrupt_and_no_worker_outlives_its_parent(tmp_path, end):
    (tmp_path / "script.py").write_text(BUSY)
    with Running(sys.executable, "script.py", end, cwd=tmp_path) as running:  # it never calls close
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 90)
        os.kill(running.process.pid, signal.SIGINT)
        running.wait_for("felt ['again', 'again']\n")
        if end == "killed":
            running.process.kill()
            wait_until(lambda: not running.processes())
        else:
            assert running.wait().code == 0


def test_calls_from_two_threads_take_turns(two):
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(two.run, lambda x, device: x, number) for number in range(40)]
        assert [call.result(60) for call in calls] == [[number] * 2 for number in range(40)]


def test_an_executor_closed_during_a_call_raises_and_can_be_used_again():
    with _executor(1, pass_device=False) as executor:
        executor.run(abs, 1)
        closing = threading.Timer(3, executor.close)
        closing.start()
        with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
            executor.run(time.sleep, 1000)
        closing.join()
        assert executor.run(abs, -2) == [2]
