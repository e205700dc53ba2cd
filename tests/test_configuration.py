"""The YAML file of a run: which names and values it may have, and what its errors say."""

import os
import sys

import pytest
import yaml

from ddp_ref import get_loader, load_config

MINIMAL = """
data: {type: !pyobject training_job.Points, args: [9]}
model: {type: !pyobject torch.nn.Linear, args: [4, 2]}
criterion: !pyobject torch.nn.CrossEntropyLoss
training:
  num_epochs: 2
  batch_size: 3
  optimizer_type: !pyobject torch.optim.SGD
"""
ALLOW = ("__main__", "training_job")


def read(text, folder, **options):
    path = folder / "config.yaml"
    path.write_text(text)
    return load_config(path, ALLOW, **options)


@pytest.mark.parametrize(
    "name",
    [
        "builtins.eval",
        # Through a module that is allowed:
        "torch.serialization.os.system",
        "__main__.system",
        "__main__.alias.system",
        # Through attributes:
        "__main__.function.__globals__",
        "torch.nn.Linear.__init__.__globals__",
        "torch.nn",
        # Functions of torch and of the package that run or unpickle what they are given:
        "torch.hub.load",
        "torch.nn.functional.boolean_dispatch",
        "ddp_ref.run_ranks",
        "ddp_ref.workers.subprocess.Popen",
    ],
)
def test_other_names_are_refused_and_nothing_is_run(name, monkeypatch):
    def function():
        """A function whose globals hold everything that this module imported."""

    function.__module__ = "__main__"
    attributes = {"alias": os, "system": os.system, "function": function}
    for attribute, value in attributes.items():
        monkeypatch.setattr(sys.modules["__main__"], attribute, value, raising=False)
    assert yaml.load("!pyobject __main__.function", get_loader()) is function
    with pytest.raises((AttributeError, ImportError, ValueError)) as caught:
        yaml.load(f'!pyobject "{name}"', get_loader())
    assert "\n" not in str(caught.value)


def test_an_error_lists_the_allowed_modules_and_nothing_else_is_imported():
    text = r"!pyobject this\.s is not defined in torch\.nn\.modules, .*, __main__: extend allow="
    with pytest.raises(ValueError, match=text):
        yaml.load("!pyobject this.s", get_loader())
    assert "this" not in sys.modules


def test_numbers_and_keys_are_read_as_they_are_meant():
    loader = get_loader()
    text = "[1e-3, 1E5, -2.5e+3, 1e3x, 1_0, 3, x, null]"
    assert yaml.load(text, loader) == [1e-3, 1e5, -2500.0, "1e3x", 10, 3, "x", None]
    assert yaml.load("{a: &x {b: 1}, c: {<<: *x, d: 2}}", loader)["c"] == {"b": 1, "d": 2}
    merged = "{d: &a {k: 1}, x: {y: &b {<<: *a, k: 2}}, z: {<<: *b}}"
    assert yaml.load(merged, loader)["z"] == {"k": 2}
    with pytest.raises(ValueError, match="line 3: the key lr occurs twice"):
        yaml.load("a:\n  lr: 1\n  lr: 2\n", loader)
    assert yaml.safe_load("1e-3") == "1e-3"  # PyYAML's own loader is unchanged
    for other_tag in ("!!python/object/apply:os.system ['true']", "!pyobject [os, system]"):
        with pytest.raises(yaml.YAMLError):
            yaml.load(other_tag, loader)


def test_overrides(tmp_path):
    overrides = ["training.num_epochs=7", "early_stopping.type=DefaultEarlyStopping"]
    overrides += ["training.path=", "training.optimizer_kwargs.lr=1e-2"]
    config = read(MINIMAL, tmp_path, overrides=overrides)
    assert config["training"]["num_epochs"] == 7 and config["training"]["path"] is None
    assert config["training"]["optimizer_kwargs"] == {"lr": 0.01}
    assert config["early_stopping"]["type"] == "DefaultEarlyStopping"


def section(line):
    """Return the change that adds a section to MINIMAL."""
    return "training:", f"{line}\ntraining:"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("num_epochs: 2", "num_epochs: 2.0"), r"training\.num_epochs: 2\.0 is not of type 'int"),
        (("batch_size", "batchsize"), r"training: .*'batchsize' .*: did you mean batch_size\?"),
        (("!pyobject torch.optim.SGD", "SGD"), r"optimizer_type: 'SGD' .*: write !pyobject MODULE"),
        (section("parallel: {output_device: 0}"), r"output_device: 0 .*: leave it out, it is set"),
        (section("metrics: {f1: f1}"), r"metrics\.f1: 'f1' is not of type '!pyobject'"),
        (section("validation: {drop_last: true}"), r"True is not one of .*: every item is evalu"),
        (
            section("validation: {validator: {device: cuda}}"),
            r"validation\.validator\.device must be None, as in training: remove it",
        ),
        (
            section("testing: {fraction: 0, data: {type: !pyobject torch.nn.Linear}}"),
            "testing: .*: remove data or fraction",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(tmp_path, change, text):
    with pytest.raises(ValueError, match=text) as caught:
        read(MINIMAL.replace(*change), tmp_path)
    assert "config.yaml: " in str(caught.value) and "\n" not in str(caught.value)
