"""What a run leaves in its folder: its history and checkpoints. And its figures."""

import csv
import math
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
from training_job import Points, job

from ddp_ref import LearningRateMonitor, run_ranks
from ddp_ref.callbacks import HistoryFile
from ddp_ref.figures import _figure

LIMIT = timedelta(minutes=4)


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_folder_of_a_resumed_run_on_two_ranks(tmp_path):
    def work():
        seen = []
        for epochs in (2, 3):
            options = {"callbacks": [LearningRateMonitor()], "run_dir": tmp_path / "run"}
            handler = job(12, 2, **options, log=seen.append)
            handler.set_val_loader(Points(5), 2)
            handler.load(tmp_path / "run")
            handler.train(epochs)
        handler.plot_metrics(tmp_path / "new" / "a.svg")
        return handler.history, seen

    (history, lines), other = run_ranks(work, nproc=2, timeout=LIMIT)
    assert other == (history, []) and len(history["val_accuracy"]) == 3
    assert "<svg" in (tmp_path / "new" / "a.svg").read_text()
    folder = tmp_path / "run"
    steps = {f"step_{step:09}.pt" for step in (3, 6, 9)}
    assert {path.name for path in folder.iterdir()} == {"history.csv"} | steps
    table = rows(folder / "history.csv")
    assert [row.pop("epoch") for row in table] == ["1", "2", "3"]
    assert {name: [float(row[name]) for row in table] for name in table[0]} == history

    assert lines[0].endswith("starting from scratch")
    assert lines[1].startswith("epoch 1 | train_loss ") and "val_accuracy 0." in lines[1]
    loaded = lines.index(f"loaded {folder / 'step_000000006.pt'}: epoch 2, step 6")
    assert lines[loaded + 1].startswith("epoch 3 | ") and lines[-1].startswith("saved ")


def test_a_list_that_began_late_belongs_to_the_last_epochs(tmp_path):
    history = {"train_loss": [4.0, 3.0, 2.0, 1.0], "val_loss": [math.nan, 5.0, 4.0]}
    writer = HistoryFile(tmp_path)
    writer.handler = SimpleNamespace(rank=0, history=history)
    writer.on_epoch_end()
    assert [row["val_loss"] for row in rows(tmp_path / "history.csv")] == ["", "nan", "5.0", "4.0"]
    (axes,) = _figure(history, ["loss"]).axes
    drawn = {line.get_label(): [list(axis) for axis in line.get_data()] for line in axes.lines}
    expected = {
        "training": [[1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0]],
        "validation": [[2, 3, 4], [math.nan, 5.0, 4.0]],
        "lowest: 4, epoch 4": [[4], [4.0]],
    }
    np.testing.assert_equal(drawn, expected)  # which takes NaN for equal
    assert axes.get_xlabel() == "epoch" and axes.get_ylabel() == "loss"
