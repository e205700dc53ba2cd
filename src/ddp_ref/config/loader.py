"""Load the YAML file that describes a training run, and check it key by key.

In the file, `!pyobject torch.optim.AdamW` names a Python object. Only names on an allow-list are
resolved, so a file cannot run arbitrary code.
"""

import importlib
import re
import sys
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

from ..training.callbacks import Callback
from .schema import check_config

ALLOW = ("torch", "__main__")
PACKAGE = __package__.rpartition(".")[0]  # ddp_ref, under whatever name it was copied
TAG = "!pyobject"

# From torch and this package, only the parts of a training run are allowed: both also have
# functions that run commands or unpickle their arguments.
TORCH = ("torch.nn", "torch.optim", "torch.utils.data.dataset")  # not datapipes: they unpickle
PARTS = (nn.Module, Optimizer, LRScheduler, Dataset)


def load_config(
    path: str | Path, allow: Sequence[str] = ALLOW, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Load and check a configuration, and fill in the defaults.

    Args:
        path: The YAML file.
        allow: The modules whose names `!pyobject` may use, as in `get_loader`.
        overrides: Values that replace those of the file, such as "training.num_epochs=5".

    Returns:
        The configuration, with every key.

    Raises:
        ValueError: If the file cannot be read or is not valid YAML, or if a key or value is not
            allowed. One line names the key, the value and what is allowed.
        FileNotFoundError: If there is no such file.
        ImportError: If PyYAML is not installed.
    """
    loader = get_loader(allow)
    import yaml

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no configuration {path} in {Path.cwd()}")
    try:
        config = yaml.load(path.read_bytes(), loader)
        for override in overrides:
            name, _, value = override.partition("=")
            _set(config, name, yaml.load(value, loader))
        return check_config(config)
    except Exception as error:  # PyYAML raises many types
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def get_loader(allow: Sequence[str] = ALLOW) -> type:
    """Return a loader class for `yaml.load(file, get_loader())`.

    It reads plain values and resolves `!pyobject` names. `1e-3` is a number, and a key that occurs
    twice is an error.

    Args:
        allow: Modules. A name must start with one of them, and what it names must be defined in
            one of them or in a module below. From torch, only modules, optimizers, schedulers, data
            sets, loss functions and dtypes are allowed. Callbacks of this package always are.

    Raises:
        ImportError: If PyYAML is not installed.
    """
    if isinstance(allow, str):
        raise TypeError(f"allow must be a list of module names, not the string {allow!r}")
    try:
        import yaml
    except ImportError as error:
        raise ImportError("configurations need PyYAML: pip install PyYAML") from error

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            keys = [(key.tag, key.value) for key, _ in node.value]
            for number, key in enumerate(keys):
                if key in keys[:number]:
                    line = node.value[number][0].start_mark.line + 1
                    raise ValueError(f"line {line}: the key {key[1]} occurs twice: remove one")
            return node

    def construct(loader: Any, node: Any) -> Any:
        name = loader.construct_scalar(node)
        try:
            return resolve(name, allow)
        except ValueError as error:
            raise ValueError(f"line {node.start_mark.line + 1}: {TAG} {name}: {error}") from error

    Loader.add_constructor(TAG, construct)
    # Numbers such as 1e-3, which YAML 1.1 reads as strings.
    number = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader


def resolve(name: str, allow: Sequence[str] = ALLOW) -> Any:
    """Return the object with the dotted `name`, or raise ValueError if it is not allowed."""
    allowed = (*allow, PACKAGE)
    start = next((prefix for prefix in allowed if _under(name, [prefix])), "")
    parts = name.removeprefix(start).split(".")[1:]
    if not start or not parts or any(p.startswith("_") or not p.isidentifier() for p in parts):
        raise _not_allowed(name, allow)
    try:
        value: Any = importlib.import_module(start)
        for part in parts:
            if isinstance(value, ModuleType) and not hasattr(value, part):
                importlib.import_module(f"{value.__name__}.{part}")
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(str(error)) from error
    home = _home(value)
    if not _under(home, allowed):
        raise _not_allowed(home, allow)
    _check_kind(value, home)
    return value


def _not_allowed(name: str, allow: Sequence[str]) -> ValueError:
    top = name.split(".")[0]
    known = top in sys.stdlib_module_names or top in allow
    way_out = "call it in a function of yours" if known else f"pass allow={[*allow, top]}"
    return ValueError(f"{name} is not a public part of {', '.join(allow)}: {way_out}")


def _under(name: str, prefixes: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)


def _set(config: Any, name: str, value: Any) -> None:
    """Set the key with the dotted `name`; missing sections are added."""
    *sections, key = name.split(".")
    for section in sections:
        if isinstance(config, dict) and config.get(section) is None:
            config[section] = {}
        config = config[section] if isinstance(config, dict) else None
    if not isinstance(config, dict):
        raise ValueError(f"cannot set {name}: every part except the last must be a section")
    config[key] = value


def _home(value: Any) -> str:
    """Return the name of the module in which `value` is defined."""
    home = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
    home = home or type(value).__module__
    return "__main__" if home == "__mp_main__" else home  # spawn's name for the main module


def _check_kind(value: Any, home: str) -> None:
    """Raise ValueError if `value`, from the module `home`, is no part of a training run."""
    kind = value if isinstance(value, type) else type(None)
    if _under(home, ["torch"]):
        is_part = issubclass(kind, PARTS) and _under(home, TORCH)
        if not (is_part or home == F.__name__ or isinstance(value, torch.dtype)):
            raise ValueError(
                "from torch, only modules, optimizers, schedulers, data sets, dtypes and functions "
                f"that {F.__name__} defines are allowed: call others in a function of yours"
            )
    if _under(home, [PACKAGE]) and not issubclass(kind, Callback):
        raise ValueError("from this package, only callbacks are allowed")
