"""ParallelExecutor, parallelize_on_gpus: a result per device, from processes that then end."""

import os
from collections import namedtuple

import pytest
import torch

from ddp_ref import ParallelExecutor, parallel_on_all_devices, parallelize_on_gpus
from ddp_ref.launch import available_cores

pytestmark = pytest.mark.filterwarnings("ignore:no CUDA device is visible")  # has its own test
Point = namedtuple("Point", "x y")
CPU = torch.device("cpu")


@pytest.fixture
def two():
    """Return an executor with two CPU workers."""
    with ParallelExecutor(num_gpus=2) as executor:
        yield executor


def test_results_come_back_intact_and_in_device_order(two):
    def work(device, data, *, scale):
        weight = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
        made = weight * 2
        made.sum().backward()
        point = Point((data.to(device) * scale, weight), {"set": {1}})
        return {"made": made, "nested": [point, None], "process": os.getpid()}

    results = two.run(work, torch.tensor([1, 2, 3]), scale=2)
    assert len(results) == len(two.devices) == 2
    for result in results:
        (data, weight), rest = result["nested"][0]
        assert type(result["nested"][0]) is Point and rest == {"set": {1}}
        assert data.dtype == torch.int64 and data.tolist() == [2, 4, 6]
        assert (weight.dtype, weight.shape, weight.requires_grad) == (torch.bfloat16, (2, 3), True)
        assert weight.grad is None and result["made"].grad_fn is None
    assert len({os.getpid(), *(result["process"] for result in results)}) == 3


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (lambda device, data: (str(device), data), (1,), {}),
        (lambda device, data: (str(device), data), (), {"data": 1}),
    ],
)
def test_the_device_fills_the_parameter_named_device(two, func, args, kwargs):
    assert two.run(func, *args, **kwargs) == [("cpu", 1)] * 2


def test_a_decorated_function_runs_on_all_devices(capfd):
    @parallelize_on_gpus(num_gpus=2, pass_device=False)
    def add(x, y):
        os.write(2, b"written\n")
        return x + y

    assert [total.item() for total in add(torch.tensor(1), y=2)] == [3, 3]
    assert capfd.readouterr() == ("", "written\n" * 2)  # their output goes where ours goes


@pytest.mark.parametrize("num_gpus", [None, 3])
def test_without_cuda_one_warning_says_what_runs_instead(num_gpus):
    workers = num_gpus or min(2, available_cores())
    with pytest.warns(UserWarning) as caught, ParallelExecutor(num_gpus) as executor:
        assert executor.devices == [CPU] * workers
    (warning,) = caught
    assert str(warning.message) == f"no CUDA device is visible: {workers} CPU workers instead"


def test_data_parallel_runs_the_whole_batch_without_cuda():
    forward = parallel_on_all_devices(lambda chunk, factor: chunk * factor)
    batch = torch.randn(8, 3)
    with pytest.warns(UserWarning, match="the whole batch runs on the CPU"):
        assert torch.equal(forward(batch, factor=2), batch * 2)
