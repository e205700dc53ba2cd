"""TrainerDDP: build the data, the model and a Handler from a YAML file, and train.

In the file, `!pyobject torch.optim.AdamW` names a Python object. Only objects that are defined in
allowed modules are resolved, so a file cannot run arbitrary code.
"""

import difflib
import importlib
import logging
import multiprocessing
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, random_split

from .callbacks import Callback, Checkpoint, EarlyStopping
from .data import eval_loader, length_of, length_or_none, train_loader
from .handler import Handler
from .initialize import DistInfo, initialize_ddp
from .launch import detect_launch
from .randomness import seed_everything

# What every file may name: parts of a training run. None of them runs commands or unpickles files.
PARTS = ("torch.nn.modules", "torch.nn.functional", "torch.optim", "torch.utils.data.dataset")
ALWAYS_ALLOWED = (*PARTS, "torch.dtype", Callback.__module__)
DEFAULT_STOPPING = "DefaultEarlyStopping"
SLOW = "in each epoch, the num_workers take seconds to start under mp.spawn: use torchrun or 0"


def _section(keys: Mapping[str, Any], *required: str) -> dict[str, Any]:
    """Return the schema of a section that has these keys and no others."""
    rules = {"additionalProperties": False, "required": [*required], "properties": keys}
    return {"type": "object"} | rules


# The JSON Schema of a configuration. It has a type of its own: !pyobject is a class or a function.
# A "description" becomes the end of an error message.
COUNT = {"type": "integer", "minimum": 1}
COUNT_OR_NULL = {"type": ["integer", "null"], "minimum": 1}
NUMBER_OR_NULL = {"type": ["number", "null"], "exclusiveMinimum": 0}
TEXT_OR_NULL = {"type": ["string", "null"]}
FLAG = {"type": "boolean"}
LIST = {"type": "array"}
KWARGS = {"type": "object", "propertyNames": {"type": "string"}}
PYOBJECT = {"type": "!pyobject", "description": "write !pyobject MODULE.NAME"}
OBJECT = {"type": PYOBJECT, "args": LIST, "kwargs": KWARGS}
OPTIONAL = {"type": ["object", "null"]}
AUTOMATIC = {"type": "null", "description": "leave it out, it is set automatically"}
LOADING = {"num_workers": {"type": "integer"}, "pin_memory": FLAG, "prefetch_factor": COUNT_OR_NULL}
PARALLEL = {
    "world_size": COUNT_OR_NULL,
    "master_addr": TEXT_OR_NULL,
    "master_port": {"type": ["integer", "string", "null"], "maximum": 65535},
    "timeout": NUMBER_OR_NULL | {"maximum": 31_536_000},
    **dict.fromkeys(("rank", "output_device"), AUTOMATIC),
    "find_unused_parameters": FLAG,
}
TRAINING = {
    **LOADING,
    **dict.fromkeys(("num_epochs", "batch_size", "accumulate", "sync_every"), COUNT),
    **dict.fromkeys(("forward", "count", "collate_fn"), PYOBJECT),
    **dict.fromkeys(("device", "path"), TEXT_OR_NULL),
    **{f"optimizer_{key}": rule for key, rule in OBJECT.items()},
    "scheduler": _section(OBJECT | {"every": {"enum": ["epoch", "step"]}}, "type") | OPTIONAL,
    "clip_norm": NUMBER_OR_NULL,
    "precision": {"enum": ["fp32", "bf16", "fp16"]},
    "on_nonfinite": {"enum": ["raise", "skip"]},
    "seed": {"type": "integer", "minimum": 0},
    "drop_last": FLAG,
    "checkpoint_at": COUNT_OR_NULL,
    "keep": {"type": "array", "items": {"type": "string"}},
}
EVALUATION = {
    **LOADING,
    "batch_size": COUNT,
    "data": _section(OBJECT, "type"),
    "fraction": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "drop_last": {"enum": [False], "description": "every item is evaluated"},
    **dict.fromkeys(("validator", "tester"), _section({"device": TEXT_OR_NULL})),
}
NOT_BOTH = {"not": {"required": ["data", "fraction"]}, "description": "remove data or fraction"}
STOPPING = PYOBJECT | {"type": ["!pyobject", "string"], "pattern": f"^{DEFAULT_STOPPING}$"}
KEYS = {
    **dict.fromkeys(("data", "model"), _section(OBJECT, "type")),
    **dict.fromkeys(("validation", "testing"), _section(EVALUATION) | {"allOf": [NOT_BOTH]}),
    "criterion": PYOBJECT,
    "metrics": KWARGS | {"additionalProperties": PYOBJECT},
    "parallel": _section(PARALLEL),
    "training": _section(TRAINING, "num_epochs", "batch_size", "optimizer_type"),
    "early_stopping": _section(OBJECT | {"type": STOPPING}, "type") | OPTIONAL,
    "callbacks": {"type": "array", "items": _section(OBJECT, "type")},
}
CONFIG = _section(KEYS, "data", "model", "criterion", "training")


def setup_logging(rank: int) -> None:
    """Log to standard error as "[RANK 0] time LEVEL name: text".

    Rank 0 logs from INFO, the other ranks from WARNING. If the program has set up logging already,
    this does nothing.

    Args:
        rank: This process's rank.
    """
    level = logging.INFO if rank == 0 else logging.WARNING
    line = f"[RANK {rank}] %(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level, format=line)


def load_config(
    path: str | Path, allow: Sequence[str] = ("__main__",), overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Load a configuration and check it.

    Args:
        path: The YAML file.
        allow: Your modules whose names `!pyobject` may use, as in `get_loader`.
        overrides: Values that replace those of the file, such as "training.num_epochs=5".

    Raises:
        ValueError: If the file is not valid YAML, or if a key or value is not allowed. One line
            names the key, the value and what is expected.
        OSError: If the file cannot be read.
        ImportError: If PyYAML is not installed. It needs jsonschema as well.
    """
    import yaml

    loader, text = get_loader(allow), Path(path).read_bytes()
    try:
        config: dict[str, Any] = yaml.load(text, loader)
        for override in overrides:
            name, _, value = override.partition("=")
            _set(config, name, yaml.load(value, loader))
        _check(config)
    except Exception as error:  # PyYAML raises many types
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    return config


def get_loader(allow: Sequence[str] = ("__main__",)) -> type:
    """Return a loader class for `yaml.load(file, get_loader())`.

    It reads plain values and resolves `!pyobject` names. `1e-3` is a number, and a key that occurs
    twice is an error.

    Args:
        allow: Your modules. `!pyobject` may name what is defined in them or below. Torch's layers,
            losses, optimizers, schedulers, data sets and dtypes, and the callbacks of this package,
            are always allowed. Do not allow all of torch: `torch.hub.load` runs code from the
            internet.

    Raises:
        ImportError: If PyYAML is not installed.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            keys = [(key.tag, key.value) for key, _ in node.value]
            for key, _ in reversed(node.value):
                if keys.count((key.tag, key.value)) > 1:
                    line = key.start_mark.line + 1
                    raise ValueError(f"line {line}: the key {key.value} occurs twice: remove one")
            return node

    def construct(loader: Any, node: Any) -> Any:
        return _resolve(loader.construct_scalar(node), allow)

    Loader.add_constructor("!pyobject", construct)
    # Numbers such as 1e-3, which YAML 1.1 reads as strings.
    number = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader


class TrainerDDP:
    """Train and test the model that a configuration describes.

    The constructor and all methods are collective, so all ranks call them, except `run_test`. If
    no process group is open, the constructor opens one: the launcher's, or, without a launcher and
    with `parallel.world_size` above 1, the one at `parallel.master_addr` and `master_port`.

    Args:
        rank: This process's rank.
        config: What `load_config` returns, or a dict with the same keys.

    Raises:
        ValueError: If a key is wrong, or the rank or world size is not that of the group.
    """

    def __init__(self, rank: int, config: dict[str, Any]) -> None:
        _check(config)
        self._config, self._training = config, config["training"]
        parallel, training = config.get("parallel", {}), self._training
        self._path, self._seed = training.get("path"), training.get("seed", 0)
        # The keys of `training` that are arguments of Handler; it has their defaults.
        options = {k: v for k, v in training.items() if k in signature(Handler).parameters}
        self.info = _join(rank, parallel, training.get("device"))
        torch.manual_seed(self._seed)  # the same initial weights as a script with this line
        model = _build(config["model"])
        keys = {key: training.get(f"optimizer_{key}") for key in ("type", "args", "kwargs")}
        optimizer = _build(keys, model.parameters())
        if section := options.get("scheduler"):
            every = section.get("every", "epoch")
            options["scheduler"] = _build(section, optimizer), every
        #: the Handler that trains
        self.handler = Handler(
            model,
            optimizer,
            _instance(config["criterion"]),
            metrics={n: _instance(m) for n, m in config.get("metrics", {}).items()},
            callbacks=self._callbacks(),
            run_dir=self._path,
            log=logging.getLogger("ddp_ref.handler").info,
            ddp_options={k: v for k, v in parallel.items() if k == "find_unused_parameters"},
            **options,
        )

    def prepare_dataloaders(self) -> tuple[DataLoader[Any], DataLoader[Any], DataLoader[Any]]:
        """Return the loaders for training, validation and testing.

        The split depends only on `training.seed`, so it is the same on all ranks. The first two
        loaders give each rank its shard, the third gives every rank the whole test set.
        `len(loader.dataset)` is the size of the whole split.
        """
        train_set, val_set, test_set = self._datasets()
        order = {"seed": self._seed, "drop_last": self._training.get("drop_last", False)}
        return (
            train_loader(train_set, **order, **self._loading("training")),
            eval_loader(val_set, **self._loading("validation")),
            eval_loader(test_set, rank=0, world_size=1, **self._loading("testing")),
        )

    def run_training(
        self, train_loader: DataLoader[Any], val_loader: DataLoader[Any]
    ) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        """Train to the end, starting from the newest checkpoint in `training.path`, if any.

        Args:
            train_loader: The training loader from `prepare_dataloaders`, or another one of data
                with a length, as `Handler.set_train_loader` takes it.
            val_loader: The validation loader from `prepare_dataloaders`, or another one, as
                `Handler.set_val_loader` takes it. If it is empty, nothing is validated.

        Returns:
            The results of training and of validation, one dict per epoch, with "loss" and the
            metrics.

        Raises:
            ValueError: If the checkpoint is from a run on other data.
            Exception: Other errors as in `Handler.load` and `Handler.train`.
        """
        handler, samples = self.handler, length_or_none(train_loader.dataset)
        handler.set_train_loader(train_loader)
        if length_or_none(val_loader.dataset) != 0:
            handler.set_val_loader(val_loader)
        if self._path is not None:
            handler.load(self._path, keep=self._training.get("keep", ()))
            before = handler.data.get("size")
            if before not in (None, samples):  # items of the test set could be trained on
                raise ValueError(
                    f"the checkpoint is from a run on {before} training samples, but now there "
                    f"are {samples}: use the same data and fractions, or another training.path"
                )
        handler.train(self._training["num_epochs"])
        return self._results("train"), self._results("val")

    def run_test(self, test_loader: Iterable[Any]) -> dict[str, float]:
        """Return "loss" and the metrics over `test_loader` (not collective).

        Only the calling rank computes, with its own copy of the model.

        Args:
            test_loader: The third loader of `prepare_dataloaders`, or your own.
        """
        return self.handler.evaluate(test_loader)

    def _callbacks(self) -> list[Callback]:
        sections = [*self._config.get("callbacks", []), self._config.get("early_stopping")]
        callbacks = [_build(section) for section in sections if section]
        if self._path is not None:
            callbacks.append(Checkpoint(self._path, self._training.get("checkpoint_at", 1)))
        return callbacks

    def _datasets(self) -> tuple[Dataset[Any], Dataset[Any], Dataset[Any]]:
        """Return the data sets for training, validation and testing, the same on all ranks."""
        seed_everything(self._seed)  # random data sets are then the same on all ranks
        whole = _build(self._config["data"])
        sections = [self._config.get(name, {}) for name in ("validation", "testing")]
        shares = [0 if "data" in s else s.get("fraction", 0.1) for s in sections]
        sizes = [round(share * length_of(whole)) for share in shares]
        sizes.append(len(whole) - sum(sizes))  # for training
        parts = random_split(whole, sizes, torch.Generator().manual_seed(self._seed))
        own = [section.get("data") for section in sections]
        val_set, test_set = (_build(d) if d else part for d, part in zip(own, parts, strict=False))
        return parts[2] if any(sizes[:2]) else whole, val_set, test_set

    def _loading(self, name: str) -> dict[str, Any]:
        """Return the options of a section's loader."""
        section = self._config.get(name, {})
        workers, start = section.get("num_workers", 0), multiprocessing.get_start_method(True)
        if workers and start == "spawn" and self.info.rank == 0:  # in a process of mp.spawn
            warnings.warn(SLOW, stacklevel=3)
        options = {key: section[key] for key in LOADING if key in section}
        if self.info.device.type == "cpu":
            options["pin_memory"] = False  # it speeds up copies to a GPU; without one, torch warns
        options["batch_size"] = section.get("batch_size", self._training["batch_size"])
        return options | {"collate_fn": self._training.get("collate_fn")}

    def _results(self, part: str) -> list[dict[str, float]]:
        history = self.handler.history
        names = [n for n in ("loss", *self.handler.metrics) if f"{part}_{n}" in history]
        columns = [history[f"{part}_{name}"] for name in names]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _resolve(name: str, allow: Sequence[str]) -> Any:
    """Return the object with the dotted `name`, or raise ValueError if it is not allowed."""
    allowed = (*ALWAYS_ALLOWED, *allow)
    first, *parts = name.split(".")
    if first in [module.split(".")[0] for module in allowed]:
        value: Any = importlib.import_module(first)
        for part in parts:
            if isinstance(value, ModuleType) and not hasattr(value, part):
                importlib.import_module(f"{value.__name__}.{part}")
            value = getattr(value, part)
        named = value if hasattr(value, "__qualname__") else type(value)
        home = f"{named.__module__}.{named.__qualname__}.".replace("__mp_main__", "__main__")
        if home.startswith(tuple(f"{module}." for module in allowed)):
            return value
    raise ValueError(f"!pyobject {name} is not defined in {', '.join(allowed)}: extend allow=")


def _set(config: Any, name: str, value: Any) -> None:
    """Set the key with the dotted `name`; missing sections are added."""
    *sections, key = name.split(".")
    for section in sections:
        config = config.setdefault(section, {})
        if not isinstance(config, dict):
            raise ValueError(f"cannot set {name}: {section} is not a section")
    config[key] = value


def _check(config: Any) -> None:
    """Raise ValueError, in one line, if a key or value is not allowed."""
    import jsonschema

    types = jsonschema.Draft4Validator.TYPE_CHECKER  # later drafts take 2.0 for an integer
    types = types.redefine("!pyobject", lambda _, value: callable(value))
    validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=types)
    if error := next(validator(CONFIG).iter_errors(config), None):
        raise ValueError(_explain(error))
    device = config["training"].get("device")
    for name, report in (("validation", "validator"), ("testing", "tester")):
        if config.get(name, {}).get(report, {}).get("device") not in (None, device):
            raise ValueError(f"{name}.{report}.device must be {device}, as in training: remove it")


def _explain(error: Any) -> str:
    """Return one line that says which key is wrong, its value and what is expected."""
    where, hint = error.json_path[2:] or "the configuration", error.schema.get("description")
    if error.validator == "additionalProperties":
        known = [*error.schema["properties"]]
        unknown = next(key for key in error.instance if key not in known)
        close = difflib.get_close_matches(str(unknown), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(known)}"
    return f"{where}: {error.message}" + (f": {hint}" if hint else "")


def _instance(value: Any) -> Any:
    """Return an instance of a class, and anything else as it is."""
    return value() if isinstance(value, type) else value


def _build(section: Mapping[str, Any], *first: Any) -> Any:
    make = EarlyStopping if section["type"] == DEFAULT_STOPPING else section["type"]
    return make(*first, *(section.get("args") or ()), **(section.get("kwargs") or {}))


def _join(rank: int, parallel: Mapping[str, Any], device: str | None) -> DistInfo:
    """Open the group unless it is open, and check that it is the one in the configuration."""
    seconds, world_size = parallel.get("timeout"), parallel.get("world_size")
    timeout = None if seconds is None else timedelta(seconds=seconds)
    try:
        launched = detect_launch().master_addr is not None
    except ValueError:  # MPI, for one, which does not say where the ranks meet, but the file may
        launched = False
    by_hand = world_size not in (None, 1) and not launched
    names = ("rank", "world_size", "master_addr", "master_port") if by_hand else ()
    place: dict[str, Any] = {name: {**parallel, "rank": rank}.get(name) for name in names}
    info = initialize_ddp(timeout, backend="gloo" if device == "cpu" else None, **place)
    if (rank, world_size or info.world_size) != (info.rank, info.world_size):
        raise ValueError(
            f"rank is {rank} and parallel.world_size is {world_size}, but this process is rank "
            f"{info.rank} of {info.world_size}: pass that rank, and set world_size to null"
        )
    return info
