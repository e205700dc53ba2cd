"""Load the YAML file that describes a training run, and check it key by key.

In the file, `!pyobject torch.optim.AdamW` names a Python object. Only names on an allow-list are
resolved, so a file cannot run arbitrary code.
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

from ..training.callbacks import Callback
from ..training.run_folder import replace_text
from .schema import check_config

ALLOW = ("torch", "__main__")
PACKAGE = __package__.rpartition(".")[0]  # ddp_ref, under whatever name it was copied
TAG = "!pyobject"

# From torch and this package, only the parts of a training run are allowed: both also have
# functions that run commands or unpickle their arguments.
TORCH = ("torch.nn", "torch.optim", "torch.utils.data.dataset")  # not datapipes: they unpickle
PARTS = (nn.Module, Optimizer, LRScheduler, Dataset)
FLOAT = (  # numbers such as 1e-3, which YAML 1.1 reads as strings; for add_implicit_resolver
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


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
        ValueError: If the file is not valid YAML, or a key or value is not allowed. One line names
            the key, the value and what is allowed.
        OSError: If the file cannot be read.
        ImportError: If PyYAML is not installed.
    """
    loader = get_loader(allow)
    import yaml

    try:
        config = yaml.load(Path(path).read_text(encoding="utf-8"), loader)
        for override in overrides:
            name, _, value = override.partition("=")
            _set(config, name, yaml.load(value, loader))
        return check_config(config)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no configuration {path} in {Path.cwd()}") from error
    except OSError:
        raise
    except Exception as error:  # PyYAML raises many types
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def get_loader(allow: Sequence[str] = ALLOW) -> type:
    """Return a loader class for `yaml.load(file, get_loader())`.

    It reads plain values and resolves `!pyobject` names. `1e-3` is a number, and a key that occurs
    twice is an error.

    Args:
        allow: Modules. A name must belong to one of them or to a module below it, and so must
            every object on its dotted path. From torch, only modules, optimizers, schedulers, data
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
                raise ValueError(
                    f"line {line}: the key {key.value} occurs twice: remove one of them"
                )
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor(TAG, construct)
    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    Loader.add_implicit_resolver(*FLOAT)
    return Loader


def dump_config(config: Any, path: str | Path) -> None:
    """Write `config` as YAML that `load_config` reads, provided its names are allowed."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def named(dumper: Any, value: Any) -> Any:
        home = "" if isinstance(value, torch.dtype) else f"{_home(value)}."
        return dumper.represent_scalar(TAG, home + getattr(value, "__qualname__", str(value)))

    Dumper.add_implicit_resolver(*FLOAT)  # so that the string "1e5" gets quotes
    Dumper.add_multi_representer(object, named)
    replace_text(Path(path), yaml.dump(config, Dumper=Dumper, sort_keys=False))


def resolve(name: str, allow: Sequence[str] = ALLOW) -> Any:
    """Return the object with the dotted `name`, or raise ValueError if it is not allowed."""
    allow = (*allow, PACKAGE)
    start = next((prefix for prefix in allow if _under(name, prefix)), None)
    rest = name.removeprefix(start or "").split(".")[1:]
    if start is None or not rest or any(part.startswith("_") or not part for part in rest):
        raise ValueError(
            f"only public names under {', '.join(allow)} are allowed: {_way_out(name)}"
        )
    value: Any = _module(start)
    for part in rest:
        value = _attribute(value, part)
        home = _home(value)
        if not any(_under(home, prefix) for prefix in allow):
            raise ValueError(
                f"it belongs to the module {home}, but only {', '.join(allow)} are allowed: "
                f"{_way_out(home)}"
            )
    _check_kind(value)
    return value


def _way_out(name: str) -> str:
    return f'if you trust it, pass allow=("torch", "__main__", "{name.split(".")[0]}")'


def _set(config: Any, name: str, value: Any) -> None:
    """Set the key with the dotted `name`; missing sections are added."""
    *sections, key = name.split(".")
    for section in sections:
        if isinstance(config, dict) and config.get(section) is None:
            config[section] = {}
        config = config[section] if isinstance(config, dict) else None
    if not isinstance(config, dict):
        raise ValueError(f"{name} cannot be set: every part of it but the last must be a section")
    config[key] = value


def _under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no module {error.name}") from error


def _attribute(owner: Any, name: str) -> Any:
    """Return the attribute or the submodule `name` of `owner`."""
    if isinstance(owner, ModuleType) and not hasattr(owner, name):
        return _module(f"{owner.__name__}.{name}")
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise ValueError(str(error)) from error


def _home(value: Any) -> str:
    """Return the name of the module in which `value` is defined."""
    if isinstance(value, ModuleType):
        home = value.__name__
    else:
        home = getattr(value, "__module__", None) or type(value).__module__
    return "__main__" if home == "__mp_main__" else home  # spawn's name for the main module


def _check_kind(value: Any) -> None:
    home, kind = _home(value), value if isinstance(value, type) else type(None)
    if _under(home, "torch"):
        is_part = issubclass(kind, PARTS) and any(_under(home, prefix) for prefix in TORCH)
        if not (is_part or home == F.__name__ or isinstance(value, torch.dtype)):
            raise ValueError(
                "from torch, only modules, optimizers, schedulers, data sets, functions of "
                f"{F.__name__} and dtypes are allowed: call anything else in a function of yours"
            )
    if _under(home, PACKAGE) and not issubclass(kind, Callback):
        raise ValueError("from this package, only callbacks are allowed")
