"""ParallelExecutor, parallelize_on_gpus: a result per device, workers reused and never leaked."""

import functools
import gc
import operator
import os
import signal
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch
from harness import Running, wait_until

from ddp_ref import ParallelExecutor, parallel_on_all_devices, parallelize_on_gpus
from ddp_ref.launch import available_cores
from ddp_ref.workers import process

pytestmark = pytest.mark.filterwarnings("ignore:no CUDA device is visible")  # has its own test
Point = namedtuple("Point", "x y")
CPU = torch.device("cpu")
UNUSUAL = [torch.uint16, torch.float8_e4m3fn, torch.complex64]  # plain pickle cannot send the first


def _pids(executor: ParallelExecutor) -> list[int]:
    return executor.run(lambda device: os.getpid())


@pytest.fixture(scope="module")
def two():
    """Return an executor with two CPU workers. The tests that kill no worker share it."""
    with ParallelExecutor(2) as executor:
        _pids(executor)  # start the workers now: no_leaks fails a test that starts them
        yield executor


def test_results_come_back_intact_and_in_device_order(two):
    def work(device, data, *, scale):
        weight = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
        whole = torch.zeros(6)
        made = weight * 2
        made.sum().backward()
        return {
            "made": made,
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
    assert len({*_pids(two), os.getpid()}) == 3


class Model:
    def method(self, device, data):
        return str(device), data


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (lambda device, data: (str(device), data), (1,), {}),
        (lambda device, data: (str(device), data), (), {"data": 1}),
        (lambda data, device: (str(device), data), (1,), {}),
        (lambda data, *, device: (str(device), data), (1,), {}),
        (lambda *data, **named: (str(named["device"]), *data), (1,), {}),
        (Model().method, (1,), {}),
        (functools.partial(lambda device, one, two: (str(device), one * two), two=1), (1,), {}),
    ],
)
def test_the_device_fills_the_parameter_named_device(two, func, args, kwargs):
    assert two.run(func, *args, **kwargs) == [("cpu", 1)] * 2


def test_without_pass_device_the_function_gets_its_own_arguments_only():
    with ParallelExecutor(1, pass_device=False) as executor:
        assert executor.run(operator.add, 1, 2) == [3]
        executor.close()  # the next call starts new workers
        assert executor.run(lambda device: device, device="mine") == ["mine"]


def test_a_decorated_function_runs_on_all_devices():
    @parallelize_on_gpus(num_gpus=2)
    def add(device, x, y):
        """Say what it does."""
        return (x + y).to(device)

    assert [total.item() for total in add(torch.tensor(1), y=2)] == [3, 3]
    assert (add.__name__, add.__doc__) == ("add", "Say what it does.")


class TwoArguments(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_exception_keeps_its_type_and_the_workers_live_on(two, monkeypatch):
    """A worker that fails later than the other one lives on, however slow the machine is."""
    monkeypatch.setattr(process, "FAILURE_WINDOW", 20)

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


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # subprocess warns that it still runs
def test_an_executor_that_is_dropped_leaves_no_process():
    executor = ParallelExecutor(1)
    (pid,) = _pids(executor)
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
    with ParallelExecutor(2) as executor:
        for kind, end in ends.items():
            with pytest.raises(RuntimeError, match=rf"worker \d on [a-z0-9:]+ {end}"):
                executor.run(die, kind)
            assert executor.run(lambda device, data: data, 1) == [1, 1]
        first, second = _pids(executor)
        os.kill(first, signal.SIGKILL)  # between two calls
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        again = _pids(executor)
        assert again[0] != first and again[1] == second


@pytest.mark.parametrize("num_gpus", [0, 1.5, print])  # the last: without parentheses
@pytest.mark.parametrize("call", [ParallelExecutor, parallelize_on_gpus])
def test_a_bad_number_of_gpus_is_refused(call, num_gpus):
    with pytest.raises(ValueError, match="num_gpus must be None or an integer of at least 1"):
        call(num_gpus)


@pytest.mark.parametrize("num_gpus", [None, 3])
def test_without_cuda_one_warning_says_what_runs_instead(num_gpus):
    workers = num_gpus or min(2, available_cores())
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


BUSY = """
import os
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
"""


def test_an_executor_works_on_after_an_interrupt_and_no_worker_outlives_its_parent(tmp_path):
    (tmp_path / "script.py").write_text(BUSY)
    with Running(sys.executable, "script.py", cwd=tmp_path) as running:  # it never calls close
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 90)
        running.process.send_signal(signal.SIGINT)
        result = running.wait()
    assert (result.stdout, result.code) == ("felt ['again', 'again']\n", 0), result.stderr


def test_close_ends_a_busy_call_and_the_executor_can_be_used_again():
    with ParallelExecutor(1, pass_device=False) as executor, ThreadPoolExecutor(1) as pool:
        executor.run(abs, 1)
        call = pool.submit(executor.run, time.sleep, 1000)
        time.sleep(2)
        executor.close()
        with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
            call.result(30)
        assert executor.run(abs, -2) == [2]


def test_calls_from_two_threads_take_turns(two):
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(two.run, lambda x, device: x, number) for number in range(40)]
        assert [call.result(60) for call in calls] == [[number] * 2 for number in range(40)]
