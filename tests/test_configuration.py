"""The YAML file of a run: which names and values it may have, and what its errors say."""

import os
import sys
from inspect import signature

import pytest
import torch
import yaml
from torch import nn

import ddp_ref
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
ALLOW = ("torch", "__main__", "training_job")


def read(text, folder, **options):
    path = folder / "config.yaml"
    path.write_text(text)
    return load_config(path, ALLOW, **options)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.nn.functional.mse_loss", nn.functional.mse_loss),
        ("torch.optim.lr_scheduler.StepLR", torch.optim.lr_scheduler.StepLR),
        ("torch.utils.data.TensorDataset", torch.utils.data.TensorDataset),
        ("torch.float64", torch.float64),
        (f"{ddp_ref.__name__}.EarlyStopping", ddp_ref.EarlyStopping),
    ],
)
def test_allowed_names_are_resolved(name, expected):
    assert yaml.load(f"!pyobject {name}", get_loader()) is expected


@pytest.mark.parametrize(
    "name",
    [
        "builtins.eval",
        "torch",
        "torch..nn",
        # Through a module that is allowed:
        "torch.serialization.os.system",
        "__main__.system",
        "__main__.alias.system",
        # Through attributes:
        "__main__._function",
        "__main__.function.__globals__.os",
        "torch.nn.Linear.__subclasses__",
        "torch._C",
        # Functions of torch and of the package that run or unpickle what they are given:
        "torch.hub.load",
        "torch.utils.data.datapipes.iter.routeddecoder.RoutedDecoderIterDataPipe",
        "torch.nn.functional.boolean_dispatch",
        "torch.fx.GraphModule",
        "ddp_ref.run_ranks",
        "ddp_ref.workers.subprocess.Popen",
        "torch.nothing.Nothing",
    ],
)
def test_other_names_are_refused_and_nothing_is_run(name, monkeypatch):
    def function():
        """A function whose globals hold everything that this module imported."""

    function.__module__ = "__main__"
    attributes = {"alias": os, "system": os.system, "function": function, "_function": function}
    for attribute, value in attributes.items():
        monkeypatch.setattr(sys.modules["__main__"], attribute, value, raising=False)
    assert yaml.load("!pyobject __main__.function", get_loader()) is function
    with pytest.raises(ValueError, match="line 2: !pyobject") as caught:
        yaml.load(f'a: 1\nb: !pyobject "{name}"', get_loader())
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_names_in_a_package(tmp_path, monkeypatch):
    """Submodules, a class in a class, a function with the name of its module, a private prefix."""
    package = tmp_path / "zoo" / "_vendor"
    package.mkdir(parents=True)
    (tmp_path / "zoo" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from .unet import unet\n")
    (package / "unet.py").write_text("def unet(): pass\nclass Net:\n    class Block: pass\n")
    (package / "broken.py").write_text("import no_such_package\n")
    (package / "hub.py").write_text("from torch.hub import load\n")
    monkeypatch.syspath_prepend(tmp_path)
    loader = get_loader(allow=("zoo._vendor", "torch"))
    assert yaml.load("!pyobject zoo._vendor.unet", loader).__name__ == "unet"
    other = get_loader(allow=("zoo._vendor.unet",))
    assert yaml.load("!pyobject zoo._vendor.unet.Net.Block", other).__name__ == "Block"
    for name, text in (
        ("_vendor.broken.Net", "No module named 'no_such_package'"),
        ("_other.Net", r"zoo\._other\.Net is not a public part of zoo\._vendor"),
        ("_vendor.hub.load", "from torch, only modules, optimizers"),
    ):
        with pytest.raises(ValueError, match=text):
            yaml.load(f"!pyobject zoo.{name}", loader)


def test_only_a_third_party_module_is_worth_allowing():
    with pytest.raises(ValueError, match=r"pass allow=\['torch', '__main__', 'torchvision'\]"):
        yaml.load("!pyobject torchvision.models.resnet18", get_loader())
    for name in ("os.system", "torch.os.system"):
        with pytest.raises(ValueError, match="is not a public part of torch, __main__: wrap it"):
            yaml.load(f"!pyobject {name}", get_loader())


def test_numbers_and_keys_are_read_as_they_are_meant():
    loader = get_loader()
    text = "[1e-3, 1E5, -2.5e+3, 1e3x, 1_0, 3, x, null]"
    assert yaml.load(text, loader) == [1e-3, 1e5, -2500.0, "1e3x", 10, 3, "x", None]
    assert yaml.load("{a: &x {b: 1}, c: {<<: *x, d: 2}}", loader)["c"] == {"b": 1, "d": 2}
    merged = "{d: &a {k: 1}, x: {y: &b {<<: *a, k: 2}}, z: {<<: *b}}"
    assert yaml.load(merged, loader)["z"] == {"k": 2}
    with pytest.raises(ValueError, match="line 3: the key lr occurs twice"):
        yaml.load("a:\n  lr: 1\n  lr: 2\n", loader)
    assert yaml.load("{1: a, '1': b}", loader) == {1: "a", "1": "b"}
    assert yaml.safe_load("1e-3") == "1e-3"  # PyYAML's own loader is unchanged
    assert yaml.safe_load("{a: 1, a: 2}") == {"a": 2}
    for other_tag in ("!!python/object/apply:os.system ['true']", "!pyobject [os, system]"):
        with pytest.raises(yaml.YAMLError):
            yaml.load(other_tag, loader)


def test_missing_keys_get_their_defaults(tmp_path):
    config = read(MINIMAL, tmp_path)
    assert config["training"]["optimizer_kwargs"] == {} and config["training"]["checkpoint_at"] == 1
    assert config["validation"]["batch_size"] is None and config["early_stopping"] is None
    assert config["parallel"]["world_size"] is None and config["model"]["args"] == [4, 2]
    other = read(MINIMAL, tmp_path)
    other["training"]["optimizer_kwargs"]["lr"] = 1
    assert read(MINIMAL, tmp_path) == config  # configurations share no defaults


def test_defaults_are_those_of_handler(tmp_path):
    training, own = read(MINIMAL, tmp_path)["training"], signature(ddp_ref.Handler).parameters
    names = training.keys() & own.keys()
    assert names > {"seed", "accumulate", "clip_norm", "precision", "sync_every", "scheduler"}
    assert {name: training[name] for name in names} == {name: own[name].default for name in names}


def test_overrides(tmp_path):
    overrides = ["training.num_epochs=7", "early_stopping.type=DefaultEarlyStopping"]
    overrides += ["training.path=", "training.optimizer_kwargs.lr=1e-2"]
    config = read(MINIMAL, tmp_path, overrides=overrides)
    assert config["training"]["num_epochs"] == 7 and config["training"]["path"] is None
    assert config["training"]["optimizer_kwargs"] == {"lr": 0.01}
    assert config["early_stopping"]["type"] == "DefaultEarlyStopping"
    with pytest.raises(ValueError, match=r"cannot set criterion\.x"):
        read(MINIMAL, tmp_path, overrides=["criterion.x=1"])


def section(line):
    """Return the change that adds a section to MINIMAL."""
    return "training:", f"{line}\ntraining:"


def training(line):
    """Return the change that adds a key to its section "training"."""
    return "training:", f"training:\n  {line}"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("num_epochs: 2", "num_epochs: true"), r"training\.num_epochs must be .*, not True"),
        (("batch_size: 3", "batch_size: 0"), r"training\.batch_size must .* from 1 to .*, not 0"),
        (("  batch_size: 3\n", ""), r"training\.batch_size is missing: it must be an integer"),
        (("batch_size", "batchsize"), "did you mean batch_size.*: use one of .*num_ep"),
        (("!pyobject torch.optim.SGD", "SGD"), r"optimizer_type must be a class .*, not 'SGD'"),
        (("args: [4, 2]", "args: 4"), r"model\.args must be a list, not 4"),
        (("args: [4, 2]", "kwargs: {1: 2}"), r"model\.kwargs must be a mapping of names"),
        (section("parallel: 3"), "parallel must be a mapping of world_size, rank"),
        (section("parallel: {output_device: 0}"), "output_device must be left out"),
        (section("parallel: {master_port: 99999}"), "must be a port from 1"),
        (section("metrics: [1]"), "metrics must be a mapping of names"),
        (section("metrics: {loss_std: !pyobject torch.nn.Linear}"), "named loss_"),
        (section("callbacks: [{tpye: 1}]"), r"unknown key 'tpye' in callbacks\[0\] \(did"),
        (section("validation: {drop_last: true}"), "every item is evaluated"),
        (section("validation: {fraction: 1}"), "a number from 0 to 1"),
        (
            section("validation: {validator: {device: cuda}}"),
            "device is .cuda., but training.device",
        ),
        (
            section("testing: {fraction: 0, data: {type: !pyobject torch.nn.Linear}}"),
            "testing has both data and fraction",
        ),
        (training("device: 0"), r"training\.device must be a device"),
        (training("forward: f"), r"training\.forward must be a function \(!py"),
        (("num_epochs: 2", "num_epochs: !!bool x"), "config.yaml: 'x'"),
        (("num_epochs: 2", f"num_epochs: {'[' * 3000}"), "config.yaml: maximum recursion"),
        ((MINIMAL, ""), "the configuration must be a mapping of data, model.*, not None"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(tmp_path, change, text):
    with pytest.raises(ValueError, match=text) as caught:
        read(MINIMAL.replace(*change), tmp_path)
    assert "config.yaml: " in str(caught.value) and "\n" not in str(caught.value)


def test_the_error_names_a_file_that_is_missing_or_not_text(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"config\.yaml: .*unacceptable character"):
        load_config(tmp_path / "config.yaml")
    with pytest.raises(FileNotFoundError, match=r"there is no configuration .*none.yaml in /"):
        load_config(tmp_path / "none.yaml")


def test_without_pyyaml_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match="pip install PyYAML"):
        get_loader()
    with pytest.raises(TypeError, match="a list of module names, not the string 'torch'"):
        get_loader("torch")
