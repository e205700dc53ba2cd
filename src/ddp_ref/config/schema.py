"""The keys of a configuration: the values that each one allows, and its default."""

import copy
import difflib
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

DEFAULT_STOPPING = "DefaultEarlyStopping"


class REQUIRED:
    """The default of a key that must be given."""


class Rule(NamedTuple):
    """The values that a key allows, in words and as a test, and its default.

    A key whose default is None may be null in the file.
    """

    allowed: str
    accepts: Callable[[Any], bool]
    default: Any = REQUIRED


class Section(NamedTuple):
    """Keys under one name. By default none of them is given; None is for an optional section."""

    keys: Mapping[str, "Rule | Section"]
    default: Mapping[str, Any] | None = {}


Keys = dict[str, Rule | Section]


def check_config(config: Any) -> dict[str, Any]:
    """Check a configuration and return a copy with the defaults filled in.

    Raises:
        ValueError: If a key or value is not allowed. One line names the key, the value and what is
            allowed.
    """
    checked = _check("the configuration", config, CONFIG)
    checked["callbacks"] = [
        _check(f"callbacks[{number}]", part, Section(OBJECT))
        for number, part in enumerate(checked["callbacks"])
    ]
    _check_together(checked)
    return checked


def _check(name: str, value: Any, rule: Rule | Section) -> Any:
    if value is None and rule.default is None:
        return None
    if isinstance(rule, Rule):
        allowed = f"{rule.allowed}, or null" if rule.default is None else rule.allowed
        if value is REQUIRED:
            raise ValueError(f"{name} is missing: it must be {allowed}")
        if not rule.accepts(value):
            raise ValueError(f"{name} must be {allowed}, not {reprlib.repr(value)}")
        return value
    if not isinstance(value, Mapping):
        keys = ", ".join(rule.keys)
        raise ValueError(f"{name} must be a mapping of {keys}, not {reprlib.repr(value)}")
    if unknown := [key for key in value if key not in rule.keys]:
        close = difflib.get_close_matches(str(unknown[0]), rule.keys, n=1)
        hint, known = f" (did you mean {close[0]}?)" if close else "", ", ".join(rule.keys)
        raise ValueError(f"unknown key {unknown[0]!r} in {name}{hint}: use one of {known}")
    within = "" if rule is CONFIG else f"{name}."
    return {
        key: _check(f"{within}{key}", value.get(key, copy.copy(part.default)), part)
        for key, part in rule.keys.items()
    }


def _check_together(config: Mapping[str, Any]) -> None:
    """Raise ValueError if keys contradict each other."""
    if "loss_std" in config["metrics"]:
        raise ValueError("a metric cannot be named loss_std, a reserved name: choose another name")
    device = config["training"]["device"]
    for name, report in (("validation", "validator"), ("testing", "tester")):
        section = config[name]
        if section["data"] and section["fraction"] is not None:
            raise ValueError(f"{name} has both data and fraction: remove one of them")
        if section[report]["device"] not in (None, device):
            raise ValueError(f"{name}.{report}.device must be training.device, {device!r}")


def _count(least: int = 1, default: Any = REQUIRED, most: int = 2**31 - 1) -> Rule:
    words = f"an integer from {least} to {most}"
    return Rule(words, lambda value: type(value) is int and least <= value <= most, default)


def _number(allowed: str, accepts: Callable[[float], bool]) -> Rule:
    return Rule(allowed, lambda value: type(value) in (int, float) and accepts(value), None)


def _flag(default: bool | None) -> Rule:
    return Rule("true or false", lambda value: isinstance(value, bool), default)


def _one_of(*values: str) -> Rule:
    return Rule(" or ".join(values), lambda value: value in values, values[0])


def _function(default: Any = None) -> Rule:
    return Rule("a function, by !pyobject", callable, default)


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


COUNT = _count()
TEXT = Rule("a string", lambda value: isinstance(value, str), None)
LIST = Rule("a list", lambda value: isinstance(value, list), [])
KWARGS = Rule("a mapping of names", _is_named, {})
DEVICE = Rule('a device, such as "cpu", "cuda" or "cuda:1"', lambda v: isinstance(v, str), None)
PORT = Rule("a port from 1 to 65535", lambda v: str(v).isdecimal() and 0 < int(v) < 2**16, None)
TYPE = Rule("a class or function, by !pyobject", callable)
METRICS = Rule(
    "a mapping of names to functions, by !pyobject",
    lambda value: _is_named(value) and all(map(callable, value.values())),
    {},
)
STOPPING = Rule(
    f'"{DEFAULT_STOPPING}" or a class, by !pyobject',
    lambda value: callable(value) or value == DEFAULT_STOPPING,
)
OBJECT: Keys = {"type": TYPE, "args": LIST, "kwargs": KWARGS}
LOADING: Keys = {
    "num_workers": _count(0, 0),
    "pin_memory": _flag(False),
    "prefetch_factor": _count(default=None),
}
EVALUATION: Keys = LOADING | {
    "batch_size": _count(default=None),
    "data": Section(OBJECT, None),
    "fraction": _number("a number from 0 to 1", lambda value: 0 <= value < 1),
    "drop_last": Rule("false, because every item is evaluated", lambda v: v is False, False),
}
PARALLEL: Keys = {
    "world_size": _count(default=None),
    "rank": _count(0, None),
    "master_addr": TEXT,
    "master_port": PORT,
    "timeout": _number("seconds, from 1 to a year", lambda value: 1 <= value <= 365 * 86_400),
    "output_device": Rule("left out (ranks use their own device)", lambda v: False, None),
    "find_unused_parameters": _flag(None),
}
HANDLER: Keys = {  # of "training", and arguments of Handler
    "seed": _count(0, 0, most=2**63 - 1),
    "forward": _function(),
    "count": _function(),
    "accumulate": _count(1, 1),
    "clip_norm": _number("a number above 0", lambda value: value > 0),
    "precision": _one_of("fp32", "bf16", "fp16"),
    "on_nonfinite": _one_of("raise", "skip"),
    "sync_every": _count(1, 10),
}
TRAINING: Keys = {
    **LOADING,
    **HANDLER,
    "device": DEVICE,
    "path": TEXT,
    "num_epochs": COUNT,
    "batch_size": COUNT,
    "optimizer_type": TYPE,
    "optimizer_args": LIST,
    "optimizer_kwargs": KWARGS,
    "scheduler": Section(OBJECT | {"every": _one_of("epoch", "step")}, None),
    "collate_fn": _function(),  # of validation and testing as well
    "drop_last": _flag(False),
    "checkpoint_at": Rule("epochs, or null", lambda v: v is None or COUNT.accepts(v), 1),
}
CONFIG = Section(
    {
        "data": Section(OBJECT),
        "model": Section(OBJECT),
        "criterion": _function(REQUIRED),
        "metrics": METRICS,
        "parallel": Section(PARALLEL),
        "training": Section(TRAINING),
        "validation": Section(EVALUATION | {"validator": Section({"device": DEVICE})}),
        "testing": Section(EVALUATION | {"tester": Section({"device": DEVICE})}),
        "early_stopping": Section(OBJECT | {"type": STOPPING}, None),
        "callbacks": LIST,
    }
)
