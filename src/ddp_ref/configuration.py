"""The YAML file that describes a training run: read without running its code, checked key by key.

In the file, `!pyobject torch.optim.AdamW` names an object of Python.
"""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from .callbacks import Callback
from .run_folder import replace_text
from .schema import check_config

ALLOW = ("torch", "__main__")
TAG = "!pyobject"

# Of torch and of this package only what a training run is made of: both have functions that run
# commands or unpickle their arguments.
TORCH = ("torch.nn", "torch.optim", "torch.utils.data.dataset")  # datapipes unpickle
PARTS = (nn.Module, Optimizer, LRScheduler, Dataset)
FLOAT = (  # what YAML 1.1 takes for a string, such as 1e-3; for add_implicit_resolver
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def load_config(
    path: str | Path, allow: Sequence[str] = ALLOW, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the configuration in the YAML file `path`, checked, and with every key it left out.

    `!pyobject` takes names under `allow`, as get_loader says. `overrides` are values for keys, as
    "training.num_epochs=5". Raises ValueError in one line that names the key, the value and what is
    allowed; OSError where the file cannot be read; ImportError without PyYAML.
    """
    loader = get_loader(allow)
    import yaml

    try:
        config = yaml.load(Path(path).read_text(encoding="utf-8"), loader)
        for override in overrides:
            name, _, value = override.partition("=")
            _set(config, name, yaml.load(value, loader))
        return check_config(config)
    except OSError:
        raise
    except Exception as error:  # PyYAML raises any type for what it cannot read
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def get_loader(allow: Sequence[str] = ALLOW) -> type:
    """Return a loader for `yaml.load(file, get_loader())`: plain values, and `!pyobject` names.

    A name must be of a module under one of `allow`, and so must all that its dots pass through. Of
    torch, only modules, optimizers, schedulers, data sets, loss functions and dtypes are taken; of
    this package, always, callbacks. `1e-3` is a number, and a key that comes twice is an error.
    Raises ImportError without PyYAML.
    """
    if isinstance(allow, str):
        raise TypeError(f"allow must be a list of module names, not the string {allow!r}")
    try:
        import yaml
    except ImportError as error:
        raise ImportError("configurations need PyYAML: pip install PyYAML") from error

    class Loader(yaml.SafeLoader):
        pass

    def construct(loader: Any, node: Any) -> Any:
        name = loader.construct_scalar(node)
        try:
            return resolve(name, allow)
        except ValueError as error:
            raise ValueError(f"line {node.start_mark.line + 1}: {TAG} {name}: {error}") from error

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        keys = [key for key, _ in node.value]
        for number, key in enumerate(keys):
            if (key.tag, key.value) in [(other.tag, other.value) for other in keys[:number]]:
                line = key.start_mark.line + 1
                raise ValueError(f"line {line}: the key {key.value} is there twice: leave out one")
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor(TAG, construct)
    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    Loader.add_implicit_resolver(*FLOAT)
    return Loader


def dump_config(config: Any, path: str | Path) -> None:
    """Write `config` as YAML that load_config reads, if it may take the names in it."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def named(dumper: Any, value: Any) -> Any:
        home = "" if isinstance(value, torch.dtype) else f"{_home(value)}."
        return dumper.represent_scalar(TAG, home + getattr(value, "__qualname__", str(value)))

    Dumper.add_implicit_resolver(*FLOAT)  # so that a text such as 1e5 gets quotes
    Dumper.add_multi_representer(object, named)
    replace_text(Path(path), yaml.dump(config, Dumper=Dumper, sort_keys=False))


def resolve(name: str, allow: Sequence[str] = ALLOW) -> Any:
    """Return the object that a dotted `name` means, as get_loader says; else raise ValueError."""
    allow = (*allow, __package__)
    start = next((prefix for prefix in allow if _under(name, prefix)), None)
    rest = name.removeprefix(start or "").split(".")[1:]
    if start is None or not rest or any(part.startswith("_") or not part for part in rest):
        raise ValueError(f"a public name under {', '.join(allow)} is allowed")
    found: Any = _module(start)
    for part in rest:
        found = _step(found, part)
        home = _home(found)
        if not any(_under(home, prefix) for prefix in allow):
            raise ValueError(
                f"it is of the module {home}, allowed are those under {', '.join(allow)}: "
                "add it to allow if you trust it"
            )
    _check_kind(found)
    return found


def _set(config: Any, name: str, value: Any) -> None:
    """Set the key with the dotted `name`; a section that is not there is made."""
    *sections, key = name.split(".")
    for section in sections:
        if isinstance(config, dict) and config.get(section) is None:
            config[section] = {}
        config = config[section] if isinstance(config, dict) else None
    if not isinstance(config, dict):
        raise ValueError(f"{name} cannot be set: what its dots pass through must be sections")
    config[key] = value


def _under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no module {error.name}") from error


def _step(found: Any, part: str) -> Any:
    """Return what the name `part` means in `found`."""
    if isinstance(found, ModuleType) and not hasattr(found, part):
        try:
            return importlib.import_module(f"{found.__name__}.{part}")
        except ModuleNotFoundError as error:
            raise ValueError(f"{found.__name__} has no {part}") from error
    try:
        return getattr(found, part)
    except AttributeError as error:
        raise ValueError(str(error)) from error


def _home(found: Any) -> str:
    """Return the module that `found` is of."""
    if isinstance(found, ModuleType):
        home = found.__name__
    else:
        home = getattr(found, "__module__", None) or type(found).__module__
    return "__main__" if home == "__mp_main__" else home  # as spawn calls it


def _check_kind(found: Any) -> None:
    home, kind = _home(found), found if isinstance(found, type) else type(None)
    if _under(home, "torch"):
        is_part = issubclass(kind, PARTS) and any(_under(home, prefix) for prefix in TORCH)
        if not (is_part or home == F.__name__ or isinstance(found, torch.dtype)):
            raise ValueError(
                "of torch, modules, optimizers, schedulers, data sets, functions of "
                f"{F.__name__} and dtypes are allowed: put anything else into a function of yours"
            )
    if _under(home, __package__) and not issubclass(kind, Callback):
        raise ValueError("of this package, callbacks are allowed")
