"""char_gpt.py trains on two ranks. Its numbers are compared with numbers computed by hand."""

import re
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from harness import SCRIPTS, run

SCRIPT = SCRIPTS / "char_gpt.py"
DEFINED = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
BLOCK = 64
SMALL = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--block-size", str(BLOCK)]
JOB = [*SMALL, "--epochs", "3", "--batch-size", "32", "--lr", "0.02", "--length", "40"]
EPOCH = re.compile(r"epoch (\d+) \| train_loss [\d.]+ \| val_loss ([\d.]+)\n([\d.]+) bits")


@pytest.fixture
def model():
    """Return a small float64 model with random weights: in a new one, the blocks have no effect."""
    torch.manual_seed(0)
    model = DEFINED.GPT("abcdefg", n_layer=2, n_head=2, n_embd=8, block_size=5).double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    return model


def train(folder, *arguments, timeout=240):
    """Run the script to its end in `folder` and return what it printed."""
    ended = run(sys.executable, SCRIPT, *arguments, cwd=folder, timeout=timeout)
    assert ended.code == 0, ended.stderr
    return ended.stdout


def saved(folder):
    """Return the newest checkpoint. Its step depends on the text, so on the version of Python."""
    *_, newest = sorted((folder / "runs/char_gpt").glob("step_*.pt"))
    return torch.load(newest, weights_only=True)


def losses(text):
    return [float(loss) for _, loss, _ in EPOCH.findall(text)]


@pytest.fixture(scope="module")
def spawned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spawned")
    return train(folder, "--nproc", "2", *JOB), folder


def test_the_loss_falls_and_the_text_is_the_models_own(spawned):
    """A model that is rebuilt from the checkpoint alone generates the text that was printed."""
    text, folder = spawned
    values = losses(text)
    assert len(values) == 3 and values == sorted(values, reverse=True) and values[-1] < 2.9
    for _, nats, bits in EPOCH.findall(text):
        assert float(bits) == pytest.approx(float(nats) / 0.693147, abs=2e-3)
    state = saved(folder)["model"]
    model = DEFINED.GPT(**state["_extra_state"])
    model.load_state_dict(state)
    assert f"\n\n{model.sample('The ', 40)}\n\n" in text
    _, val_ids = DEFINED.split(DEFINED.encode(DEFINED.read_text(), model.vocabulary))
    rows = DEFINED.windows(val_ids, BLOCK)
    mean = -model.log_likelihood(rows).double().sum().item() / (BLOCK * len(rows))
    assert values[-1] == pytest.approx(mean, abs=1e-3)
    assert f"\n\nloss in nats per character: validation text {mean:.3f} |" in text


def test_a_finished_run_only_generates_text(spawned, tmp_path):
    flags = ["--run-dir", spawned[1] / "runs/char_gpt", "--prompt", "for i in", "--length", "9"]
    text = train(tmp_path, *JOB, *flags)
    assert "3 of 3 epochs are done" in text and not EPOCH.search(text)
    assert re.search(r"\n\nfor i in(.|\n){9}\n\nloss", text)


@pytest.mark.full
@pytest.mark.first
def test_defaults(tmp_path):
    """The loss falls, the text has words, and the model finds it likelier than its reverse.

    Four of the ten epochs take less than a minute if nothing else runs.
    """
    text = train(tmp_path, "--nproc", "2", "--epochs", "4", timeout=500)
    assert losses(text)[-1] < 1.6 and losses(text)[-1] < losses(text)[0] - 0.4
    written = text.split("\n\n", 1)[1]
    assert len({"the", "is", "of", "to", "a", "in", "and"} & set(written.split())) >= 4
    scores = [float(number) for number in re.findall(r"[\d.]+", text.splitlines()[-1])]
    assert scores[1] < scores[0] < scores[2]


def test_no_paragraph_is_trained_on_and_validated():
    train_part, val_part = DEFINED.split(DEFINED.read_text())
    assert len(val_part) == pytest.approx(len(train_part) / 9, rel=1e-3)
    # The first paragraph may have been cut in two.
    assert not set(train_part.split("\n\n")) & set(val_part.split("\n\n")[1:])


def test_each_character_but_the_first_is_predicted_once():
    rows = DEFINED.windows(torch.arange(12), block_size=3)
    assert rows.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


def test_a_sample_continues_its_prompt(model):
    """At a temperature near 0, each new character is the likeliest one after the last five."""
    ids = DEFINED.encode("bad", model.vocabulary)
    for _ in range(8):
        likeliest = model(ids[None, -5:])[0, -1].argmax(0, keepdim=True)
        ids = torch.cat([ids, likeliest])
    expected = "".join(model.vocabulary[number] for number in ids)
    assert model.sample("bad", 8, temperature=1e-4) == expected
    assert model.sample("bed", 8, temperature=1e-4)[3:] != expected[3:]


def test_a_model_is_not_loaded_into_one_with_other_settings(model):
    other = DEFINED.GPT(**(model.settings | {"n_head": 4}))  # all shapes are the same
    with pytest.raises(ValueError, match=r"n_head = 2, but this model has 4: use the same flags"):
        other.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--n-embd", "30", "--n-head", "4"], "--n-embd 30 is not a multiple of --n-head 4"),
        (["--lr", "nan"], "--lr must be above 0 and finite, not nan"),
        (
            ["--batch-size", "4000", "--nproc", "3"],
            "--batch-size 4000 on 3 ranks needs 12000 rows, ",
        ),
        (["--prompt", "日 本"], "--prompt contains '日本', which does not "),
        ([], "WORLD_SIZE not set"),  # an incomplete launch
    ],
)
def test_a_mistake_is_one_line(flags, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as ended:
        DEFINED.parse_args()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and text in error and len(error.splitlines()) == 1


def test_the_learning_rate_warms_up_and_then_decays():
    rates = [DEFINED.rate(step, 100) for step in range(101)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True) and rates[100] == pytest.approx(0.1)
    assert DEFINED.rate(200, 100) == pytest.approx(0.1)  # with fewer epochs than are done
    assert 0 < DEFINED.rate(0, 1) <= 1
