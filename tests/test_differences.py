"""What the guides and the tutorial do where we differ, and that our pages name real tests."""

import ast
import inspect
import re
import socket
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import ROOT, Evil, run, torchrun
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import ddp_ref
import ddp_ref.initialize
from ddp_ref import run_ranks

PAGE = (ROOT / "docs" / "differences.md").read_text()
ALONE = {"rank": 0, "world_size": 1}
LIMIT = timedelta(minutes=4)


def test_cross_entropy_on_one_logit_learns_nothing():
    """The tutorial's job: a linear layer with one output, and random numbers as "classes"."""
    model = torch.nn.Linear(20, 1)
    loss = F.cross_entropy(model(torch.rand(32, 20)), torch.rand(32, 1))
    loss.backward()
    assert loss.item() == 0
    assert model.weight.grad is not None and model.weight.grad.abs().max() == 0


def test_data_drawn_without_a_seed_differ_on_each_rank():
    one, other = run_ranks(lambda: torch.rand(20))
    assert not torch.equal(one, other)


def test_spawning_no_process_is_a_success(tmp_path):
    code = "import torch.multiprocessing as mp; mp.spawn(print, nprocs=0)"
    result = run(sys.executable, "-c", code, cwd=tmp_path)
    assert (result.code, result.stdout) == (0, "")


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
def test_nccl_needs_a_gpu():
    with pytest.raises((RuntimeError, ValueError), match="NCCL"):
        dist.init_process_group("nccl", store=dist.HashStore(), **ALONE)
    assert not dist.is_initialized()


def test_every_rank_prints_and_epochs_that_begin_with_0_are_saved_early(tmp_path):
    line = "print(f'epoch {epoch}') if epoch % 5 == 0 else None"
    (tmp_path / "script.py").write_text(f"for epoch in range(11): {line}")
    printed = run(*torchrun(2, "script.py"), cwd=tmp_path).stdout
    epochs = sorted(map(int, re.findall("epoch ([0-9]+)", printed)))
    assert epochs == [0, 0, 5, 5, 10, 10]


def test_device_ids_are_for_gpus():
    dist.init_process_group("gloo", store=dist.HashStore(), **ALONE)
    with pytest.raises(ValueError, match="device_ids"):
        DistributedDataParallel(nn.Linear(1, 1), device_ids=[0])
    dist.destroy_process_group()


def test_pinned_memory_without_a_gpu_is_a_warning():
    with pytest.warns(UserWarning, match="'pin_memory' argument is set as true but no accelerator"):
        (batch,) = DataLoader(range(2), 2, pin_memory=True)
    assert not batch.is_pinned()


def test_a_second_run_on_a_fixed_port_fails():
    with socket.create_server(("127.0.0.1", 0)) as other_run:
        meet = f"tcp://127.0.0.1:{other_run.getsockname()[1]}"
        with pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):
            dist.init_process_group("gloo", meet, **ALONE)
    assert not dist.is_initialized()


def test_reading_the_batch_size_loads_a_whole_batch():
    loaded = []
    loader = DataLoader(range(64), 32, collate_fn=lambda items: loaded.extend(items) or items)
    assert len(next(iter(loader))) == 32
    assert len(list(loader)) == 2 and len(loaded) == 32 + 64


def test_a_padded_test_set_gives_another_accuracy():
    """The first of 10 answers is wrong, and the padding for 4 ranks repeats it."""
    right = torch.arange(10) > 0
    samplers = [DistributedSampler(range(10), 4, rank, shuffle=False) for rank in range(4)]
    drawn = [index for sampler in samplers for index in sampler]
    assert right.double().mean() == 0.9 and right[drawn].double().mean() == 10 / 12


def test_parts_overlap_if_each_rank_shuffles_by_itself():
    """First, each rank takes its part of its own permutation; then all ranks share one."""
    for seeds, overlap in (((0, 1), True), ((0, 0), False)):
        one, other = (set(DistributedSampler(range(100), 2, n, seed=seeds[n])) for n in (0, 1))
        assert bool(one & other) == overlap


def test_drop_last_skips_the_last_samples():
    drawn = torch.cat(list(DataLoader(range(10), 4, drop_last=True)))
    assert drawn.tolist() == list(range(8))


def train_as_the_tutorial(epochs, save_every, snapshot=None):
    """Return the epochs trained, the weights at the end, and the last snapshot."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained, first = [], 0
    if snapshot:
        model.load_state_dict(snapshot["weights"])
        first = snapshot["epoch"]
    for epoch in range(first, epochs):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        trained.append(epoch)
        if epoch % save_every == 0:
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            snapshot = {"weights": weights, "epoch": epoch}
    return trained, model.weight.item(), snapshot


def test_the_tutorials_snapshot():
    """After 20 epochs the last four are not saved; a resumed run repeats one, without momentum."""
    trained, _, snapshot = train_as_the_tutorial(20, save_every=5)
    assert trained == list(range(20)) and snapshot["epoch"] == 15
    again, resumed, _ = train_as_the_tutorial(20, 5, snapshot)
    assert again == [15, 16, 17, 18, 19]
    after = snapshot | {"epoch": 16}  # with the right number, the momentum is still lost
    assert train_as_the_tutorial(20, 5, after)[0] == [16, 17, 18, 19]
    unbroken = train_as_the_tutorial(20, 5)[1]
    assert unbroken not in (resumed, train_as_the_tutorial(20, 5, after)[1])


@pytest.mark.parametrize("decorator", ["", "@record"])
def test_torchrun_shows_a_traceback_only_of_a_recorded_main(tmp_path, decorator):
    lines = ["from torch.distributed.elastic.multiprocessing.errors import record", decorator]
    lines += ["def main():", "    raise ValueError('the cause')", "main()"]
    (tmp_path / "fails.py").write_text("\n".join(lines))
    report = run(*torchrun(1, "fails.py"), cwd=tmp_path).stderr.partition("Root Cause")[2]
    assert report and ("ValueError: the cause" in report) == bool(decorator)


def test_a_save_that_fails_loses_the_old_file(tmp_path):
    path = tmp_path / "snapshot.pt"
    torch.save({"weight": torch.ones(2)}, path)
    assert torch.load(path)["weight"].sum() == 2
    with pytest.raises(AttributeError):
        torch.save({"weight": torch.ones(2), "last": lambda: None}, path)  # does not pickle
    with pytest.raises(RuntimeError, match="PytorchStreamReader"):
        torch.load(path)


def test_a_file_may_run_code(tmp_path, monkeypatch):
    path, made = tmp_path / "snapshot.pt", tmp_path / "made"
    torch.save({"weight": Evil(made)}, path)
    with pytest.raises(Exception, match="weights_only"):
        torch.load(path)
    assert not made.exists()
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.warns(UserWarning, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        torch.load(path)
    assert made.exists()


# What the guides call, with which parameters: after a *, by keyword. Other names and parameters
# stand on the page.
SIGNATURES = {
    ddp_ref: "initialize_ddp(timeout,*,rank,master_addr,master_port,backend) cleanup_ddp()"
    " on_rank(rank,*,barrier) parallelize_on_gpus(*,num_gpus,pass_device)"
    " parallel_on_all_devices(func) ParallelExecutor(*,num_gpus,pass_device)"
    " Handler(*,use_distributed) TrainerDDP(rank,config) get_loader() setup_logging(rank)",
    ddp_ref.initialize: "initialize_ddp(timeout) _should_use_distributed(use_distributed_flag)"
    " _is_env_distributed() _resolve_device(device) _initialize_distributed(timeout)"
    " _pick_device(local_rank) _first_host_from_slurm_nodelist(nodelist)",
    ddp_ref.ParallelExecutor: "run(func,args,kwargs)",
    ddp_ref.Handler: "set_train_loader(*,batch_size) set_val_loader(*,batch_size) save() load()"
    " sample() log_likelihood() predict() plot_losses() plot_metrics()",
    ddp_ref.TrainerDDP: "prepare_dataloaders() run_training(train_loader,val_loader)"
    " run_test(test_loader)",
}
OTHERS = (
    "`nn_handler.utils.ddp` `.ddp_init` `.ddp_decorators` `QuantumGrav.train_ddp` `NNHandler`"
    " `worldsize=` `self.handler._rank` `validator.report()` `save_checkpoint()`"
)


def test_the_guides_names_and_parameters_exist_here_or_are_on_the_page():
    for owner, signatures in SIGNATURES.items():
        for name, given in re.findall(r"(\w+)\(([\w,*]*)\)", signatures):
            own = [p for p in inspect.signature(getattr(owner, name)).parameters if p != "self"]
            positional, _, keywords = (part.strip(",") for part in given.partition("*"))
            first = positional.split(",") if positional else []
            assert own[: len(first)] == first, name
            assert set(keywords.split(",")) - {""} <= set(own), name
    assert ddp_ref.Handler.train_losses
    assert [name for name in OTHERS.split() if name not in PAGE] == []


# Each heading about problems in the TrainerDDP guide, and the heading of our page with the answer.
ANSWERS = {
    "Port Already in Use": "`Address already in use`, `EADDRINUSE`",
    "CUDA Out of Memory": "`CUDA out of memory`",
    "Only One GPU is Used": "Only one GPU is used",
    "Processes Not Synchronizing": "It hangs",
    "Data Not Distributed Properly": "The data are not distributed as they should be",
    "GPU Usage": "It is slow",
    "Log Output": "The screen stays empty",
    "Scaling Efficiency": "More ranks are hardly faster",
    "Optimization Tips": "The GPUs wait for data",
}


def test_every_heading_of_the_guide_is_answered():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for heading, answer in ANSWERS.items():
        assert re.search(rf"^##+ {re.escape(answer)}\n\n(?!#)", page, re.MULTILINE), heading


def test_every_row_names_tests_that_exist():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert len([row for row in rows if "shown by" not in row]) >= 60
    for row in rows:
        *cells, last = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        if last == "shown by":
            columns = len(cells)
            continue
        assert len(cells) == columns and all(cells), f"an empty cell: {row}"
        names = re.findall(r"`(test_\w+)\.py::(\w+)`", last)
        assert len(names) == last.count("`") / 2 > 0, f"no test at the end of: {row}"
        for file, name in names:
            if name.startswith("check_"):  # the ranks of that test call it
                file = f"{file.removeprefix('test_')}_checks"
            assert name in functions_in(f"{file}.py"), row


def functions_in(file):
    """Return the names of the functions in a file of tests."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
