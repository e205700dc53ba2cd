"""Run third-party code as its users write it, on two real ranks. Each file here is one client.

Every test asserts what a broken port would get wrong: the loss of a script, a mean that equals that
of one process, or a resumed run that ends with the same bits.
"""

import os
import re
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import ROOT, run, torchrun

from ddp_ref import Callback, run_ranks

HERE = Path(__file__).parent
on_two_ranks = partial(run_ranks, nproc=2, timeout=timedelta(minutes=3))

SCRIPTS = {  # what to pass to each client that is started as a script, and what it prints last
    "bert": (["run"], r"validation accuracy (0\.9|1\.0)\d+"),
    "boxes": ([], r"validation loss 0\.0\d+, 25 images"),
    "gan": ([], r"(epoch \d+ \| critic \d\.\d+ \| generator \d\.\d+\n?){15}"),
    "gpt2": ([], r"validation loss per token [12]\.\d+"),
    "graphs": (["run", "1"], r"(epoch|saved) .*"),
    "graphs_from_yaml": ([HERE / "graphs.yaml", "training.num_epochs=1"], r"test accuracy 0\.\d+"),
    "loggers": (["."], r"(epoch|saved) .*"),
    "nanogpt": (["60"], r"step 60 \| train [23]\.\d+ \| val [23]\.\d+"),
    "scores": ([], r"\{'f1': 0\.\d+, 'auroc': 0\.9\d+\}"),
    "streams": ([], r"losses: \[(0\.\d+(, )?){5}\]"),
}


@pytest.mark.parametrize("client", SCRIPTS)
def test_a_client_runs_as_a_script(client, tmp_path):
    arguments, printed = SCRIPTS[client]
    command = torchrun(2, HERE / f"{client}.py", *arguments)
    ended = run(*command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, timeout=180)
    assert ended.code == 0, ended.stderr
    text = ended.stdout.strip()
    assert re.search(rf"(^|\n)({printed})\Z", text), text


class StopAt(Callback):
    """Send this process the signal of a time limit after the given step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self):
        if self.handler.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_resumes_within_an_epoch(tmp_path):
    """Hugging Face's dicts, accumulated in bf16 with a schedule: 8 epochs of 8 steps."""

    def train(folder, callbacks=()):
        import bert

        handler = bert.train(tmp_path / folder, callbacks=callbacks)
        end = torch.nn.utils.parameters_to_vector(handler.model.parameters()).detach()
        return end, handler.step, handler.history

    def unbroken_and_stopped():
        results = train("unbroken")
        with pytest.raises(SystemExit, match="143"):
            train("stopped", [StopAt(27)])
        return results

    (weights, last, history), (others, *_) = on_two_ranks(unbroken_and_stopped)
    assert torch.equal(weights, others) and last == 64
    assert history["val_accuracy"][-1] > 0.9
    newest = max((tmp_path / "stopped").glob("step_*.pt"))
    assert int(newest.stem[5:]) % 8 != 0, "it was to be stopped within an epoch"
    for resumed, step, same in on_two_ranks(train, "stopped"):
        assert torch.equal(resumed, weights) and (step, same) == (64, history)


def test_torchmetrics_equal_those_of_a_single_process_also_on_one_rank_or_without_a_sample():
    def train():
        import scores
        from torch.utils.data import DataLoader, Subset
        from torchmetrics.functional.classification import multiclass_auroc, multiclass_f1_score

        handler = scores.train()
        test_set = scores.MyTrainDataset(train=False)
        validated = handler.validate()
        alone = handler.evaluate(DataLoader(test_set, batch_size=32))
        outputs = handler.predict(test_set, batch_size=32)
        if handler.rank == 0:
            averaged = multiclass_f1_score(outputs, test_set.digits, 10, average="macro").item()
            auroc = multiclass_auroc(outputs, test_set.digits, num_classes=10).item()
            loss = torch.nn.functional.cross_entropy(outputs, test_set.digits).item()
            expected = {"loss": loss, "f1": averaged, "auroc": auroc}
            assert validated == pytest.approx(expected, abs=1e-6)
            assert alone == pytest.approx(validated, abs=1e-6)

        # One sample on two ranks: F1 adds up counts, so it works. AUROC collects lists.
        one = Subset(test_set, [0])
        handler.set_val_loader(one, batch_size=32)
        with pytest.raises(ValueError, match="some ranks have no sample for metric 'auroc'"):
            handler.validate()
        del handler._objects["auroc"]
        assert handler.validate() == pytest.approx(handler.evaluate(DataLoader(one)), abs=1e-6)
        return validated

    one, other = on_two_ranks(train)
    assert one == other and 0.5 < one["f1"] < 1
