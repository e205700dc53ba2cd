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
JOB = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--block-size", str(BLOCK)]
JOB += ["--epochs", "3", "--batch-size", "32", "--lr", "0.02", "--length", "40"]
EPOCH = re.compile(r"epoch (\d+) \| train_loss [\d.]+ \| val_loss ([\d.]+)\n([\d.]+) bits")


@pytest.fixture
def model():
    """Return a small float64 model with random weights: in a new one, the blocks have no effect."""
    torch.manual_seed(0)
    model = DEFINED.GPT("abcdefg", n_layer=2, n_head=2, n_embd=8, block_size=5).double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    return model


@pytest.mark.full
def test_the_loss_falls_and_the_text_is_the_models_own(tmp_path):
    """A model that is rebuilt from the checkpoint alone generates the text that was printed."""
    ended = run(sys.executable, SCRIPT, "--nproc", "2", *JOB, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    text = ended.stdout
    values = [float(loss) for _, loss, _ in EPOCH.findall(text)]
    assert len(values) == 3 and values == sorted(values, reverse=True) and values[-1] < 2.9
    for _, nats, bits in EPOCH.findall(text):
        assert float(bits) == pytest.approx(float(nats) / 0.693147, abs=2e-3)
    # The newest checkpoint. Its step depends on the text, so on the version of Python.
    *_, newest = sorted((tmp_path / "runs/char_gpt").glob("step_*.pt"))
    state = torch.load(newest, weights_only=True)["model"]
    model = DEFINED.GPT(**state["_extra_state"])
    model.load_state_dict(state)
    assert f"\n\n{model.sample('The ', 40)}\n\n" in text
    _, val_ids = DEFINED.split(DEFINED.encode(DEFINED.read_text(), model.vocabulary))
    rows = DEFINED.windows(val_ids, BLOCK)
    mean = -model.log_likelihood(rows).double().sum().item() / (BLOCK * len(rows))
    assert values[-1] == pytest.approx(mean, abs=1e-3)
    assert f"\n\nloss in nats per character: validation text {mean:.3f} |" in text


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


def test_the_learning_rate_warms_up_and_then_decays():
    rates = [DEFINED.rate(step, 100) for step in range(101)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True) and rates[100] == pytest.approx(0.1)
