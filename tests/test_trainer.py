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
from harness import TESTS, run, torchrun
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training_job import Points, accuracy, network

from ddp_ref import Callback, Checkpoint, LearningRateMonitor, TrainerDDP, run_ranks

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

def read(world_size):
    with open("config.yaml") as file:
        config = yaml.load(file, get_loader())
    config["parallel"]["world_size"] = world_size
    return config

def train(rank, config):
    setup_logging(rank)
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

def spawned(rank, world_size, config, port):
    initialize_ddp(rank=rank, world_size=world_size, master_addr="localhost", master_port=port)
    train(rank, config)

def launched():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    initialize_ddp(rank=rank, world_size=world_size)
    train(rank, read(world_size))

if __name__ == "__main__":
    if "RANK" in os.environ:
        launched()
    else:
        port = str(random.randrange(20_000, 32_768))  # below the ports that Linux assigns
        mp.spawn(spawned, (2, read(2), port), nprocs=2, join=True)
"""


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
        assert "pin_memory" not in ended.stderr  # no warning: it is off without a GPU
        assert warned_lines(ended.stderr) == ["trainer = TrainerDDP(rank=rank, config=config)"]
        assert "sizes: [240, 30, 30]" in ended.stderr
        runs.append((ended.stdout, (folder / "out" / "history.csv").read_text()))
        assert {path.name for path in (folder / "out").iterdir()} == {
            *("config.json", "history.csv", "log.txt", "losses.png"),
            *("step_000000030.pt", "step_000000045.pt"),
        }
        check_log(folder / "out" / "log.txt", float(ended.stdout))
        check_history(runs[-1][1])
    assert runs[0] == runs[1]


def warned_lines(text):
    """Return each line of the user's code that a warning about the device names."""
    pattern = r"script\.py:\d+: UserWarning: no cuda .*: using the CPU\n(.*)"
    assert text.count("using the CPU") == len(re.findall(pattern, text)), text
    return [line.strip() for line in re.findall(pattern, text)]


def check_log(path, test_loss):
    lines = path.read_text().splitlines()
    pattern = r"\[RANK 0\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO [\w.]+: .+"
    assert all(re.fullmatch(pattern, line) for line in lines)
    assert sum("Validation: loss=0." in line and " ± 0." in line for line in lines) == 3
    assert f"Test: loss={test_loss:.3f} ± " in lines[-1]


def check_history(text):
    rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(text.splitlines())]
    assert list(rows[0]) == ["epoch", "train_loss", "val_loss", "val_loss_std"]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[-1]["val_loss"] < rows[0]["val_loss"] and rows[0]["val_loss_std"] > 0


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


def test_results_are_the_means_and_the_spread_over_batches():
    trainer = TrainerDDP(0, configuration())
    loaders = trainer.prepare_dataloaders()
    assert [len(loader.dataset) for loader in loaders] == [40, 5, 5]
    before = [value.clone() for value in trainer.handler.model.parameters()]
    train_results, val_results = trainer.run_training(*loaders[:2])
    pairs = zip(before, trainer.handler.model.parameters(), strict=True)
    assert all(not torch.equal(*pair) for pair in pairs)
    assert [list(row) for row in train_results] == [["loss", "accuracy"]] * 3
    assert train_results[-1]["loss"] == trainer.handler.train_losses[-1]

    for results, loader in (
        (val_results[-1], loaders[1]),
        (trainer.run_test(loaders[2]), loaders[2]),
    ):
        losses, right, count = [], 0.0, 0
        with torch.no_grad():
            for inputs, targets in loader:
                outputs = trainer.handler.model(inputs)
                losses.append((nn.functional.cross_entropy(outputs, targets).item(), len(targets)))
                right += accuracy(outputs, targets).item() * len(targets)
                count += len(targets)
        mean = sum(loss * number for loss, number in losses) / count
        center = sum(loss for loss, _ in losses) / len(losses)
        spread = math.sqrt(sum((loss - center) ** 2 for loss, _ in losses) / len(losses))
        assert len(losses) == 2 and spread > 0
        expected = {"loss": mean, "accuracy": right / count, "loss_std": spread}
        assert results == pytest.approx(expected, rel=1e-6)


class Validates(Callback):
    def on_step_end(self):
        self.handler.validate()


def test_the_spread_covers_only_the_validation_at_the_end_of_the_epoch():
    spreads = []
    for callbacks in ([], [{"type": Validates}]):
        trainer = TrainerDDP(0, configuration() | {"callbacks": callbacks})
        results = trainer.run_training(*trainer.prepare_dataloaders()[:2])[1]
        spreads.append([row["loss_std"] for row in results])
    assert spreads[0] == spreads[1] and all(spreads[0])


class Drawn(Dataset):
    """Random numbers without a seed, as in the tutorial. Rank r has r * `more` extra items."""

    def __init__(self, size, more=0):
        number = size + more * int(os.environ["RANK"])
        self.items = torch.tensor([[random.random() for _ in range(4)] for _ in range(number)])

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index], (self.items[index].sum() > 2).long()


def test_the_split_is_the_same_on_all_ranks_and_nothing_leaks():
    def work():
        config = configuration()
        trainer = TrainerDDP(
            int(os.environ["RANK"]), config | {"data": {"type": Drawn, "args": [37]}}
        )
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        parts = [loader.dataset for loader in (val_loader, test_loader)]
        parts.insert(0, train_loader.dataset.dataset)
        items = [torch.stack([inputs for inputs, _ in part]) for part in parts]
        seen = torch.cat([inputs for inputs, _ in train_loader])
        config["early_stopping"] = {
            "type": "DefaultEarlyStopping",
            "kwargs": {"patience": 1, "min_delta": 10.0},
        }
        trainer = TrainerDDP(trainer.info.rank, config | {"data": {"type": Drawn, "args": [37]}})
        _, results = trainer.run_training(*trainer.prepare_dataloaders()[:2])
        config = config | {"data": {"type": Drawn, "args": [37, 1]}}
        other = TrainerDDP(trainer.info.rank, config)
        with pytest.raises(ValueError, match="all ranks must have the same data"):
            other.run_training(*other.prepare_dataloaders()[:2])
        config |= {"data": {"type": Drawn}, "parallel": {"find_unused_parameters": True}}
        assert TrainerDDP(trainer.info.rank, config).handler.model.find_unused_parameters
        return items, seen, results

    ranks = run_ranks(work, nproc=3, timeout=LIMIT)
    check_spread(ranks[0][0][1], [results for _, _, results in ranks])
    for items, _, _ in ranks:
        assert [len(part) for part in items] == [29, 4, 4]
        assert all(torch.equal(*pair) for pair in zip(items, ranks[0][0], strict=True))
    assert len(torch.cat(ranks[0][0]).unique(dim=0)) == 37
    seen = torch.cat([own for _, own, _ in ranks]).unique(dim=0)
    assert torch.equal(seen, ranks[0][0][0].unique(dim=0))  # all training items, and no others


def check_spread(items, results):
    """Check that all ranks stopped after the same epoch, with the spread over all their batches."""
    assert results[0] == results[1] == results[2] and len(results[0]) == 2
    assert len(items) == 4  # two on rank 0 and one on each of the others: one batch per rank
    assert results[0][-1]["loss_std"] > 0


def test_settings_reach_the_handler(tmp_path):
    settings = {"accumulate": 2, "clip_norm": 0.5, "precision": "bf16", "on_nonfinite": "skip"}
    settings["sync_every"] = 3
    trainer = TrainerDDP(0, configuration(**settings, seed=3))
    handler = trainer.handler
    assert {name: getattr(handler, name) for name in settings} == settings and handler.seed == 3


def as_dict(items):
    inputs, targets = torch.utils.data.default_collate(items)
    return {"x": inputs, "y": targets}


def forward(model, batch):
    return model(batch["x"]), batch["y"]


class Right:
    """A metric object that counts the correct outputs."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.right = 0

    def update(self, outputs, targets):
        self.right += (outputs.argmax(1) == targets).sum().item()

    def compute(self):
        return self.right


def test_batches_of_any_structure_with_a_scheduler_and_callbacks():
    plain = configuration()
    keys = {"collate_fn": as_dict, "forward": forward, "count": lambda batch: len(batch["y"])}
    keys["scheduler"] = {"type": torch.optim.lr_scheduler.StepLR, "args": [1], "every": "step"}
    keys["scheduler"]["kwargs"] = {"gamma": 1.0}
    dicts = configuration(**keys) | {"callbacks": [{"type": LearningRateMonitor}]}
    dicts["metrics"] = {"accuracy": accuracy, "right": Right}
    runs = []
    for config in (plain, dicts):
        trainer = TrainerDDP(0, config)
        loaders = trainer.prepare_dataloaders()
        runs.append((*trainer.run_training(*loaders[:2]), trainer.run_test(loaders[2])))
    assert trainer.handler.scheduler.last_epoch == 30 and len(trainer.handler.history["lr"]) == 3
    for one, other in zip(*runs, strict=True):
        rows = [other] if isinstance(other, dict) else other
        assert all(row.pop("right") > 0 for row in rows)
        assert one == other


def test_a_run_resumes_without_validation_data_but_not_with_other_training_data(tmp_path):
    """Without validation data, the results of an epoch's validation are NaN."""

    def train(config):
        trainer = TrainerDDP(0, config)
        return trainer.run_training(*trainer.prepare_dataloaders()[:2])

    config = configuration(path=str(tmp_path), num_epochs=1)
    train(config)
    with pytest.raises(ValueError, match=r"on 40 training .* there are 30: use the same data"):
        train(config | {"validation": {"fraction": 0.3}})
    config["training"]["num_epochs"] = 2
    config |= {"validation": {"data": {"type": Points, "args": [0]}}, "testing": {"fraction": 0.2}}
    _, val_results = train(config)
    assert [math.isnan(row["loss_std"]) for row in val_results] == [False, True]


def test_separate_validation_data_and_no_test_data():
    config = configuration()
    config["validation"] = {"data": {"type": Points, "args": [7]}}
    config["testing"] = {"fraction": 0}
    trainer = TrainerDDP(0, config)
    loaders = trainer.prepare_dataloaders()
    assert [len(loader.dataset) for loader in loaders] == [50, 7, 0]
    assert loaders[0].dataset.dataset.noise == 0  # the whole data set itself, not a Subset
    config["validation"] = {"fraction": 0}
    trainer = TrainerDDP(0, config)
    train_results, val_results = trainer.run_training(*trainer.prepare_dataloaders()[:2])
    assert len(train_results) == 3 and val_results == []
    assert math.isnan(trainer.run_test(loaders[2])["loss"])


def test_the_trainer_stops_early_saves_and_resumes(tmp_path):
    config = configuration(path=str(tmp_path), num_epochs=50, checkpoint_at=None)
    stopping = {"type": "DefaultEarlyStopping", "kwargs": {"patience": 2, "min_delta": 10.0}}
    trainer = TrainerDDP(0, config | {"early_stopping": stopping})
    _, val_results = trainer.run_training(*trainer.prepare_dataloaders()[:2])
    assert len(val_results) == 3
    assert [path.name for path in tmp_path.glob("*.pt")] == ["step_000000030.pt"]  # at the end
    config["training"]["num_epochs"] = 5
    trainer = TrainerDDP(0, config)
    resumed = trainer.run_training(*trainer.prepare_dataloaders()[:2])
    unbroken = TrainerDDP(0, configuration(num_epochs=5))
    assert resumed == unbroken.run_training(*unbroken.prepare_dataloaders()[:2])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"parallel": {"rank": 2}}, r"parallel\.rank is 2, but this process is rank 0"),
        ({"parallel": {"world_size": 2}}, "master"),
        ({"model": {"type": dict}}, r"model\.type must create a Module, not a dict"),
        ({"callbacks": [{"type": dict}]}, r"callbacks\[0\]\.type must create a Callback, not"),
        ({"model": {"type": network, "kwargs": {"x": 1}}}, "model cannot be created from its args"),
    ],
)
def test_a_configuration_that_cannot_work_in_this_process_is_rejected(change, text):
    with pytest.raises((TypeError, ValueError), match=text):
        TrainerDDP(0, configuration() | change)


def test_a_wrong_rank_is_refused():
    with pytest.raises(ValueError, match="rank is 1, but this process is rank 0"):
        TrainerDDP(1, configuration())


def test_a_signal_saves_where_the_next_run_loads(tmp_path):
    own = {"type": Checkpoint, "args": [tmp_path / "best"]}
    trainer = TrainerDDP(0, configuration(path=str(tmp_path / "run")) | {"callbacks": [own]})
    assert trainer.handler.save_folder == tmp_path / "run"


def test_a_validation_stream_is_rejected_rather_than_ignored():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    trainer = TrainerDDP(0, configuration())
    train_loader, *_ = trainer.prepare_dataloaders()
    with pytest.raises(ValueError, match="an IterableDataset cannot be evaluated"):
        trainer.run_training(train_loader, DataLoader(Stream(), 4))


def test_a_world_size_that_is_not_the_launchers_is_refused():
    def work():
        with pytest.raises(ValueError, match=r"world_size is 3, but 2 ranks run"):
            TrainerDDP(int(os.environ["RANK"]), configuration() | {"parallel": {"world_size": 3}})

    run_ranks(work, nproc=2, timeout=LIMIT)
