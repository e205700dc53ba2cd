"""Run third-party code as its users write it, on two real ranks. Each file here is one client.

Every test asserts what a broken port would get wrong: the weights moved and are the same on all
ranks, a mean equals that of a single process, or a resumed run ends with the same bits.
"""

import math
import os
import re
import signal
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import ROOT, run, torchrun

from ddp_ref import Callback, run_ranks

HERE = Path(__file__).parent
on_two_ranks = partial(run_ranks, nproc=2, timeout=timedelta(minutes=3))


def weights(model):
    """Return a copy of all weights as one vector."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def same_and_moved(start, *ends):
    """Return whether all ranks ended at the same finite weights, other than those at the start."""
    same = all(torch.equal(ends[0], end) for end in ends)
    return same and bool(ends[0].isfinite().all()) and not torch.equal(start, ends[0])


class StopAt(Callback):
    """Send this process the signal of a time limit after the given step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self):
        if self.handler.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


SCRIPTS = {  # what to pass to each client that is started as a script, and what it prints
    "bert": (["run"], r"validation accuracy (0\.9|1\.0)\d+"),
    "boxes": ([], r"validation loss 0\.0\d+, 25 images"),
    "gan": ([], r"(epoch \d+ \| critic \d\.\d+ \| generator \d\.\d+\n?){15}"),
    "gpt2": ([], r"validation loss per token [12]\.\d+"),
    "graphs": (["run", "1"], ""),
    "graphs_from_yaml": ([HERE / "graphs.yaml", "training.num_epochs=1"], r"test accuracy 0\.\d+"),
    "loggers": (["."], ""),
    "scores": ([], r"\{'f1': 0\.\d+, 'auroc': 0\.9\d+\}"),
    "streams": ([], r"losses: \[(0\.\d+(, )?){5}\]"),
}


@pytest.mark.parametrize("client", SCRIPTS)
def test_a_client_runs_as_a_script(client, tmp_path):
    arguments, printed = SCRIPTS[client]
    command = torchrun(2, HERE / f"{client}.py", *arguments)
    ended = run(*command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, timeout=180)
    assert ended.code == 0, ended.stderr
    assert re.fullmatch(printed, ended.stdout.strip()), ended.stdout


def test_graphs_with_the_loader_of_pytorch_geometric_resume_within_an_epoch(tmp_path):
    def unbroken_and_stopped():
        import graphs

        torch.manual_seed(0)
        start, handler = weights(graphs.GCN()), graphs.train(tmp_path / "unbroken", 4)
        with pytest.raises(SystemExit) as ended:
            graphs.train(tmp_path / "stopped", 4, callbacks=[StopAt(9)])
        return start, weights(handler.model), handler.val_metrics["accuracy"], ended.value.code

    def resumed():
        import graphs

        handler = graphs.train(tmp_path / "stopped", 4)
        outputs = handler.predict(graphs.Graphs(31, seed=1), 8, collate_fn=collate)
        if outputs is None:
            return weights(handler.model), handler.step, None
        targets = torch.tensor([graph.y.item() for graph in graphs.Graphs(31, seed=1)])
        return weights(handler.model), handler.step, graphs.accuracy(outputs, targets).item()

    def collate(rows):
        from torch_geometric.data import Batch

        return Batch.from_data_list(rows)

    (start, one, accuracies, code), (_, other, _, _) = on_two_ranks(unbroken_and_stopped)
    assert code == 143 and same_and_moved(start, one, other)
    last = max((tmp_path / "stopped").glob("step_*.pt"))
    assert int(last.stem[5:]) % 7 != 0, "it was to be stopped within an epoch of 7 steps"
    results = on_two_ranks(resumed)
    assert [step for _, step, _ in results] == [28, 28]
    assert all(torch.equal(end, one) for end, _, _ in results)
    assert accuracies[-1] == results[0][2]


def test_graphs_from_a_yaml_file_resume(tmp_path):
    def both():
        return train("unbroken", 4), train("stopped", 2)

    def train(folder, epochs):
        import graphs_from_yaml

        path, total = f"training.path={tmp_path / folder}", f"training.num_epochs={epochs}"
        trainer, result = graphs_from_yaml.train(HERE / "graphs.yaml", [path, total])
        handler = trainer.handler
        return weights(handler.model), (handler.step, *handler.history["lr"]), result

    ((one, progress, result), (halfway, _, _)), ((other, _, _), _) = on_two_ranks(both)
    assert same_and_moved(halfway, one, other)
    cosine = [0.01 * (1 + math.cos(math.pi * epoch / 4)) for epoch in range(4)]
    assert progress[0] == 28 and progress[1:] == pytest.approx(cosine)
    for resumed, again, same in on_two_ranks(train, "stopped", 4):
        assert torch.equal(resumed, one) and (again, same) == (progress, result)


def test_bert_with_dicts_accumulation_a_cosine_schedule_and_bf16_resumes(tmp_path):
    def train():
        import bert

        torch.manual_seed(0)
        start = weights(bert.new_model())
        handler = bert.train(tmp_path / "unbroken")
        data = bert.sentences(75, seed=1)
        outputs = handler.predict(data, batch_size=8, collate_fn=bert.collate)
        rates = [group["lr"] for group in handler.optimizer.param_groups]
        accuracies = handler.val_metrics["accuracy"]
        with suppress(SystemExit):
            bert.train(tmp_path / "stopped", callbacks=[StopAt(27)])
        return start, weights(handler.model), handler.step, rates, accuracies, outputs

    def resume():
        import bert

        end = weights(bert.train(tmp_path / "stopped").model)
        plain = bert.new_model()  # no Handler, no DDP, and the names are the model's own
        newest = max((tmp_path / "stopped").glob("step_*.pt"))
        plain.load_state_dict(torch.load(newest, weights_only=True)["model"])
        return end, weights(plain)

    results = on_two_ranks(train)
    start, end, steps, rates, accuracies, outputs = results[0]
    assert same_and_moved(start, end, results[1][1])
    assert steps == 64 and rates == [0.0], "256 sentences in 8 steps of 2 x 2 x 8, for 8 epochs"
    assert accuracies[-1] > 0.9 and results[1][5] is None
    assert len(outputs) == 75 and {*outputs[0]} == {"logits"}, "the loss has no row per sentence"
    assert {row["logits"].dtype for row in outputs} == {torch.bfloat16}
    right = [row["logits"].argmax().item() == number % 2 for number, row in enumerate(outputs)]
    assert accuracies[-1] == sum(right) / 75
    last = max((tmp_path / "stopped").glob("step_*.pt"))
    assert int(last.stem[5:]) % 8 != 0, "it was to be stopped within an epoch of 8 steps"
    for resumed, plain in on_two_ranks(resume):
        assert torch.equal(resumed, end) and torch.equal(plain, end)


def test_gpt2_on_padded_text_takes_the_steps_of_one_big_batch_and_validates_per_token():
    rows, steps = 16, 3

    def build(gpt2):
        torch.manual_seed(0)
        model = gpt2.new_model().double()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    def one_big_batch():
        import gpt2

        model, optimizer = build(gpt2)
        batch, losses, start = gpt2.collate(gpt2.texts(rows)), [], weights(model)
        for _ in range(steps):
            loss = torch.nn.functional.cross_entropy(*gpt2.forward(model, batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            held_out = gpt2.forward(model, gpt2.collate(gpt2.texts(53, seed=1)))
            losses.append(torch.nn.functional.cross_entropy(*held_out).item())
        return start, weights(model), losses

    def two_ranks(accumulate, counted):
        import gpt2

        model, optimizer = build(gpt2)
        handler = gpt2.new_handler(model, optimizer, accumulate=accumulate)
        if not counted:
            handler = gpt2.Handler(
                *build(gpt2), torch.nn.functional.cross_entropy, forward=gpt2.forward
            )
        size = rows // 2 // accumulate
        handler.set_train_loader(gpt2.texts(rows), batch_size=size, collate_fn=gpt2.collate)
        handler.set_val_loader(gpt2.texts(53, seed=1), batch_size=8, collate_fn=gpt2.collate)
        handler.train(steps)
        assert handler.step == steps
        return weights(handler.model), [*handler.train_losses, handler.validate()["loss"]]

    def all_of_them():
        torch.set_num_threads(1)
        return two_ranks(1, True), two_ranks(4, True), two_ranks(1, False)

    ((start, exact, losses),) = run_ranks(one_big_batch, nproc=1, timeout=timedelta(minutes=3))
    assert (exact - start).abs().max() > 1e-2
    for at_once, accumulated, uncounted in on_two_ranks(all_of_them):
        for end, means in (at_once, accumulated):
            assert (end - exact).abs().max() < 1e-12
            assert all(abs(a - b) < 1e-12 for a, b in zip(means, losses, strict=True))
        assert (uncounted[0] - exact).abs().max() > 1e-4, "the test sees what count= changes"


def test_f1_and_auroc_of_torchmetrics_equal_those_of_a_single_process():
    def train():
        import scores
        from torchmetrics.functional.classification import multiclass_auroc, multiclass_f1_score

        handler = scores.train()
        validated = handler.validate()
        test_set = scores.MyTrainDataset(train=False)
        outputs = handler.predict(test_set, batch_size=32)
        if outputs is None:
            return validated, handler.val_metrics, None
        targets = test_set.digits
        f1 = multiclass_f1_score(outputs, targets, num_classes=10, average="macro").item()
        parts = [
            multiclass_f1_score(o, t, num_classes=10, average="macro")
            for o, t in zip(outputs.split(32), targets.split(32), strict=True)
        ]
        whole = {"f1": f1, "auroc": multiclass_auroc(outputs, targets, num_classes=10).item()}
        return validated, handler.val_metrics, (whole, torch.stack(parts).mean().item())

    (one, history, (whole, of_means)), (other, _, _) = on_two_ranks(train)
    assert one == other and 0.5 < whole["f1"] < 1
    for name in ("f1", "auroc"):
        assert abs(one[name] - whole[name]) < 1e-6 and abs(history[name][-1] - one[name]) < 1e-6
    assert abs(of_means - whole["f1"]) > 1e-3, "the test sees a mean of the batches' scores"


def test_torchmetrics_on_one_rank_alone():
    def train():
        import scores
        from torch.utils.data import DataLoader

        handler = scores.train(epochs=1)
        objects = handler.loop.task.metrics
        objects["twice"] = objects["f1"].clone() + objects["f1"].clone()
        validated = handler.validate()
        if handler.rank == 0:  # evaluate is not collective
            test_set = scores.MyTrainDataset(train=False)
            return validated, handler.evaluate(DataLoader(test_set, batch_size=32))
        return validated, None

    (validated, alone), _ = on_two_ranks(train)
    assert {name: abs(alone[name] - validated[name]) < 1e-6 for name in alone} == {
        "loss": True,
        "f1": True,
        "auroc": True,
        "twice": True,  # a metric that contains others
    }
    assert validated["twice"] == pytest.approx(2 * validated["f1"])


def test_torchmetrics_on_a_rank_without_a_sample():
    """One sample on two ranks: F1 adds up counts, so it works. AUROC collects lists."""

    def validate():
        import scores
        from torch.utils.data import DataLoader, Subset

        handler, one = scores.train(epochs=0), Subset(scores.MyTrainDataset(train=False), [0])
        handler.set_val_loader(one, batch_size=32)
        with pytest.raises(ValueError, match="some ranks have no sample for metric 'auroc'"):
            handler.validate()
        del handler.loop.task.metrics["auroc"]
        return handler.validate(), handler.evaluate(DataLoader(one))

    results = on_two_ranks(validate)
    for validated, alone in results:
        assert validated == results[0][0] and alone == pytest.approx(validated, abs=1e-6)
        assert validated.keys() == {"loss", "f1"}


def test_streams_that_end_unevenly():
    def train():
        import streams

        numbers = []

        def forward(model, batch):
            numbers.append((batch[0] * streams.LINES).round().int().flatten().tolist())
            return streams.forward(model, batch)

        torch.manual_seed(0)
        start = weights(torch.nn.Linear(1, 1))
        handler = streams.train(forward=forward)
        return start, weights(handler.model), handler.step, numbers

    results = on_two_ranks(train)
    assert same_and_moved(results[0][0], *(end for _, end, _, _ in results))
    for rank, (_, _, steps, numbers) in enumerate(results):
        # A worker has 28 or 27 lines, which are 7 or 6 batches of 4. So a rank has 14 or 12.
        batches = 14 if rank == 0 else 12
        assert steps == len(numbers) == 40
        for start in range(0, 40 - batches, batches):  # each pass through the whole stream
            lines = [line for batch in numbers[start : start + batches] for line in batch]
            assert len({*lines}) == len(lines) == 4 * batches
            assert {line % 4 // 2 for line in lines} == {rank}


def test_detection_with_batches_of_lists():
    def train():
        import boxes

        torch.manual_seed(0)
        start, (handler, found) = weights(boxes.Detector()), boxes.train()
        validated, model = handler.validate()["loss"], handler.model
        data = [boxes.Squares(25, seed=1)[number] for number in range(25)]
        with torch.no_grad():
            losses = [model.module([image], [target])["loss"].item() for image, target in data]
        sizes = [1 + image.shape[1] % 2 for image, _ in data]
        return start, weights(model), validated, sum(losses) / 25, found, sizes

    (start, one, *means, found, sizes), (_, other, *_, nothing, _) = on_two_ranks(train)
    assert same_and_moved(start, one, other) and nothing is None
    assert abs(means[0] - means[1]) < 1e-6 and means[0] < 0.05
    assert [{name: len(part) for name, part in row.items()} for row in found] == [
        {"boxes": size} for size in sizes
    ]


def test_a_gan_in_its_own_loop(tmp_path):
    def train():
        import gan

        generator, critic, score = gan.train(path=tmp_path / "generator.pt")
        torch.manual_seed(1)
        made = generator(torch.randn(500, 4)).mean(0).tolist()
        whole = critic(gan.points(33, seed=1).tensors[0]).mean().item()
        return weights(generator), weights(critic), score, made, whole

    (g, d, score, made, whole), (g2, d2, score2, _, _) = on_two_ranks(train)
    assert torch.equal(g, g2) and torch.equal(d, d2)
    assert score == score2 and abs(score - whole) < 1e-6, "33 points: 17 and 16 on two ranks"
    assert abs(made[0] - 2) < 0.5 and abs(made[1] + 1) < 0.5, "the points are around (2, -1)"
    saved = torch.load(tmp_path / "generator.pt", weights_only=True)
    assert torch.equal(torch.cat([part.flatten() for part in saved.values()]), g)


def test_tensorboard_wandb_and_mlflow_write_the_history(tmp_path):
    def train():
        import loggers

        handler = loggers.train(tmp_path)
        return dict(handler.history)

    def read():
        import mlflow
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
        client = mlflow.MlflowClient()
        (experiment,) = (e for e in client.search_experiments() if e.name == "digits")
        (run,) = client.search_runs([experiment.experiment_id])
        names = ("train_loss", "val_loss")
        scalars = {n: [(e.step, e.value) for e in events.Scalars(n)] for n in names}
        history = {n: client.get_metric_history(run.info.run_id, n) for n in names}
        metrics = {n: [(m.step, m.value) for m in row] for n, row in history.items()}
        return scalars, metrics, read_wandb()

    def read_wandb():
        """Return what an offline run logged.

        Its file has a header of 7 bytes, and so has each record in it.
        """
        import json

        from wandb.proto.wandb_internal_pb2 import Record

        (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        data, logged = file.read_bytes()[7:], {"train_loss": [], "val_loss": []}
        while data:
            end = 7 + int.from_bytes(data[4:6], "little")
            record, data = Record.FromString(data[7:end]), data[end:]
            for item in record.history.item:
                if item.nested_key[0] in logged:
                    value = json.loads(item.value_json)
                    logged[item.nested_key[0]].append((record.history.step.num, value))
        return logged

    history, other = on_two_ranks(train)
    assert history == other and {*history} == {"train_loss", "val_loss"}
    wanted = {name: [*enumerate(values, start=1)] for name, values in history.items()}
    ((scalars, metrics, logged),) = run_ranks(read, nproc=1, timeout=timedelta(minutes=3))
    assert metrics == wanted and logged == wanted
    for name, pairs in wanted.items():
        assert [step for step, _ in scalars[name]] == [1, 2, 3]
        assert all(abs(a[1] - b[1]) < 1e-6 for a, b in zip(scalars[name], pairs, strict=True))


def test_a_loop_in_the_style_of_nanogpt_trains(tmp_path):
    ended = run(*torchrun(2, HERE / "nanogpt.py", "60"), cwd=tmp_path, timeout=180)
    assert ended.code == 0, ended.stderr
    lines = [line.split(" | ") for line in ended.stdout.splitlines()]
    assert [line[0] for line in lines] == ["step 20", "step 40", "step 60"]
    losses = [float(line[2].removeprefix("val ")) for line in lines]
    assert losses[2] < losses[1] < losses[0] < 4.5
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert saved["step"] == 60 and all(part.isfinite().all() for part in saved["model"].values())
