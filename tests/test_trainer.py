"""TrainerDDP: the guide's two scripts and its YAML file work, and all ranks share one split."""

import csv
import math
import os
import random
import re
import sys
from datetime import timedelta

import pytest
import torch
from handler_checks import F1
from harness import TESTS, run, torchrun
from torch import nn
from torch.utils.data import TensorDataset
from training_job import Points, accuracy, network

from ddp_ref import Checkpoint, LearningRateMonitor, TrainerDDP, run_ranks

LIMIT = timedelta(minutes=4)

# All sections and keys of the guide, and all its calls, in the same order.
CONFIG = """
criterion: !pyobject __main__.compute_loss
data: {type: !pyobject __main__.Points, args: [300]}
model: {type: !pyobject __main__.Model}
parallel:
  world_size: 3
  rank: null
  master_addr: "localhost"
  master_port: "12355"
  output_device: null
  find_unused_parameters: false
training:
  seed: 42
  device: "cuda"
  path: out
  num_epochs: 3
  batch_size: 8
  optimizer_type: !pyobject torch.optim.AdamW
  optimizer_args: []
  optimizer_kwargs: {lr: 1e-2, weight_decay: 0.00005}
  num_workers: 1
  pin_memory: true
  drop_last: true
  prefetch_factor: 2
  checkpoint_at: 2
validation:
  {batch_size: 8, num_workers: 0, pin_memory: true, drop_last: false, validator: {device: cuda}}
testing:
  {batch_size: 8, num_workers: 0, pin_memory: true, drop_last: false, tester: {device: cuda}}
early_stopping: {type: "DefaultEarlyStopping", args: [], kwargs: {patience: 5}}
"""
SCRIPT = """
import logging, os, random, sys
import torch, yaml
import torch.multiprocessing as mp
import training_job
from ddp_ref import TrainerDDP, cleanup_ddp, get_loader, initialize_ddp, setup_logging

def compute_loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets)

class Points(training_job.Points):
    pass

class Model(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

def train(rank, world_size, place):
    setup_logging(rank)
    initialize_ddp(rank=rank, world_size=world_size, **place)
    with open("config.yaml") as file:
        config = yaml.load(file, get_loader())
    config["parallel"]["world_size"] = world_size
    logger = logging.getLogger(__name__)
    try:
        trainer = TrainerDDP(rank=rank, config=config)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        sizes = [len(loader.dataset) for loader in (train_loader, val_loader, test_loader)]
        logger.info("sizes: %s", sizes)
        train_results, val_results = trainer.run_training(train_loader, val_loader)
        assert len(train_results) == len(val_results) == 3
        if rank == 0:
            print(trainer.run_test(test_loader)["loss"])
    finally:
        cleanup_ddp()

if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), {})
    else:
        port = random.randrange(20_000, 32_768)  # below the ports that Linux assigns
        place = {"master_addr": "localhost", "master_port": str(port)}
        mp.spawn(train, (2, place), nprocs=2, join=True)
"""


@pytest.mark.full
def test_the_guides_two_scripts(tmp_path):
    """They run under spawn and under torchrun, and give the same numbers, bit for bit."""
    runs = []
    for name, command in [
        ("spawn", [sys.executable, tmp_path / "script.py"]),
        ("torchrun", torchrun(2, tmp_path / "script.py")),
    ]:
        (tmp_path / "script.py").write_text(SCRIPT)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(CONFIG)
        ended = run(*command, cwd=folder, env=TESTS)
        assert ended.code == 0, ended.stderr
        assert "[RANK 0]" in ended.stderr and "[RANK 1]" not in ended.stderr
        assert len(re.findall(r"no cuda .*: using the CPU\n", ended.stderr)) == 1
        assert "sizes: [240, 30, 30]" in ended.stderr
        out = folder / "out"
        names = {"history.csv", "step_000000030.pt", "step_000000045.pt"}
        assert {path.name for path in out.iterdir()} >= names
        assert len(re.findall(r"^\[RANK 0\] .* epoch \d \| train_loss ", ended.stderr, re.M)) == 3
        runs.append((ended.stdout, (out / "history.csv").read_text()))
    assert runs[0] == runs[1]
    rows = [*csv.DictReader(runs[0][1].splitlines())]
    assert list(rows[0]) == ["epoch", "train_loss", "val_loss"] and len(rows) == 3
    assert float(rows[2]["val_loss"]) < float(rows[0]["val_loss"])


def configuration(**training):
    """Return the smallest configuration of a run in this process."""
    required = {"optimizer_type": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.1}}
    required |= {"num_epochs": 3, "batch_size": 4, "device": "cpu"}
    return {
        "data": {"type": Points, "args": [50]},
        "model": {"type": network},
        "criterion": nn.CrossEntropyLoss,
        "metrics": {"accuracy": accuracy},
        "training": required | training,
        "testing": {"batch_size": 3},
    }


def test_the_results_of_each_epoch_and_of_the_test_set():
    (train_results, val_results, test_results), handler = train(configuration())
    for results, part in ((train_results, "train"), (val_results, "val")):
        columns = {name: handler.history[f"{part}_{name}"] for name in ("loss", "accuracy")}
        assert {name: [row[name] for row in results] for name in columns} == columns
    assert test_results.keys() == {"loss", "accuracy"}


def drawn(size):
    """Return items with random numbers without a seed, as in the tutorial."""
    inputs = torch.tensor([[random.random() for _ in range(4)] for _ in range(size)])
    return TensorDataset(inputs, (inputs.sum(1) > 2).long())


def test_the_split_is_the_same_on_all_ranks_and_nothing_leaks():
    def work():
        rank, config = int(os.environ["RANK"]), configuration()
        config["early_stopping"] = {
            "type": "DefaultEarlyStopping",
            "kwargs": {"patience": 1, "min_delta": 10.0},
        }
        config |= {"data": {"type": drawn, "args": [37]}}
        config["parallel"] = {"find_unused_parameters": True}
        trainer = TrainerDDP(rank, config)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        parts = [loader.dataset for loader in (train_loader, val_loader, test_loader)]
        items = [torch.stack([inputs for inputs, _ in part]) for part in parts]
        seen = torch.cat([inputs for inputs, _ in train_loader])
        _, results = trainer.run_training(train_loader, val_loader)
        assert trainer.handler.model.find_unused_parameters
        assert len(test_loader) == 2  # all of the test set, in batches of 3
        return items, seen, results

    ranks = run_ranks(work, nproc=3, timeout=LIMIT)
    first, _, results = ranks[0]
    assert len(results) == 2
    for items, _, others in ranks:
        assert [len(part) for part in items] == [29, 4, 4] and others == results
        assert all(torch.equal(*pair) for pair in zip(items, first, strict=True))
    assert len(torch.cat(first).unique(dim=0)) == 37
    seen = torch.cat([own for _, own, _ in ranks]).unique(dim=0)
    assert torch.equal(seen, first[0].unique(dim=0))  # all training items, and no others


def train(config):
    trainer = TrainerDDP(0, config)
    loaders = trainer.prepare_dataloaders()
    return (*trainer.run_training(*loaders[:2]), trainer.run_test(loaders[2])), trainer.handler


def test_batches_of_any_structure_with_a_scheduler_and_callbacks():
    def collate(items):
        inputs, targets = torch.utils.data.default_collate(items)
        return {"x": inputs, "y": targets}

    schedule = {"type": torch.optim.lr_scheduler.StepLR, "args": [1], "every": "step"}
    keys = {
        "collate_fn": collate,
        "forward": lambda model, batch: (model(batch["x"]), batch["y"]),
        "count": lambda batch: len(batch["y"]),
        "scheduler": schedule | {"kwargs": {"gamma": 1.0}},
    }
    dicts = configuration(**keys) | {"callbacks": [{"type": LearningRateMonitor}]}
    dicts["metrics"] = {"accuracy": accuracy, "f1": F1}
    (results, handler), (expected, _) = train(dicts), train(configuration())
    assert handler.scheduler.last_epoch == 30 and len(handler.history["lr"]) == 3
    for row in (*results[1], results[2]):  # a metric object counts in validation only
        assert row.pop("f1") >= 0
    assert results == expected


def test_a_run_resumes_without_validation_data_but_not_with_other_training_data(tmp_path):
    config = configuration(path=str(tmp_path), num_epochs=1)
    train(config)
    with pytest.raises(ValueError, match=r"on 40 training .* there are 30: use the same data"):
        train(config | {"validation": {"fraction": 0.3}})
    config["training"]["num_epochs"] = 2
    config |= {"validation": {"data": {"type": Points, "args": [0]}}, "testing": {"fraction": 0.2}}
    (train_results, _, _), _ = train(config)
    assert len(train_results) == 2


def test_keep_takes_the_files_value_instead_of_the_checkpoints(tmp_path):
    config = configuration(path=str(tmp_path), num_epochs=1)
    train(config)
    changed = {"num_epochs": 2, "optimizer_kwargs": {"lr": 0.01}}
    config["training"] |= changed | {"keep": ["lr"]}
    _, handler = train(config)
    assert handler.epoch == 2 and handler.optimizer.param_groups[0]["lr"] == 0.01


def test_separate_validation_data_and_no_test_data():
    config = configuration() | {"validation": {"data": {"type": Points, "args": [7]}}}
    loaders = TrainerDDP(0, config | {"testing": {"fraction": 0}}).prepare_dataloaders()
    assert [len(loader.dataset) for loader in loaders] == [50, 7, 0]
    assert loaders[0].dataset.noise == 0  # the whole data set itself, not a Subset
    none = {"validation": {"fraction": 0}, "testing": {"fraction": 0}}
    (train_results, val_results, test_results), _ = train(config | none)
    assert len(train_results) == 3 and val_results == [] and math.isnan(test_results["loss"])


def test_the_trainer_stops_early_saves_and_resumes(tmp_path):
    config = configuration(path=str(tmp_path), num_epochs=50, checkpoint_at=None)
    stopping = {"type": "DefaultEarlyStopping", "kwargs": {"patience": 2, "min_delta": 10.0}}
    (_, val_results, _), _ = train(config | {"early_stopping": stopping})
    assert len(val_results) == 3
    assert [path.name for path in tmp_path.glob("*.pt")] == ["step_000000030.pt"]  # at the end
    config["training"]["num_epochs"] = 5
    assert train(config)[0] == train(configuration(num_epochs=5))[0]


def test_a_rank_or_a_world_size_that_is_not_the_launchers_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"rank is 1 .*, but this process is rank 0 of 1"):
        TrainerDDP(1, configuration())
    master = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in (master | {"RANK": "0", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"world_size is 3, but this process is rank 0 of 1"):
        TrainerDDP(0, configuration() | {"parallel": {"world_size": 3}})


def test_a_signal_saves_where_the_next_run_loads(tmp_path):
    own = {"type": Checkpoint, "args": [tmp_path / "best"]}
    trainer = TrainerDDP(0, configuration(path=str(tmp_path / "run")) | {"callbacks": [own]})
    assert trainer.handler.save_folder == tmp_path / "run"
