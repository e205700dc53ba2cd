"""The keys of a configuration: the values that each one allows, and its default."""

import copy
import difflib
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

REQUIRED: Any = object()
DEFAULT_STOPPING = "DefaultEarlyStopping"


class Rule(NamedTuple):
    """The values that a key allows, in words and as a test, and its default."""

    allowed: str
    accepts: Callable[[Any], bool]
    default: Any = REQUIRED


class Section(NamedTuple):
    """Keys under one name. An `optional` section that is left out is None."""

    keys: Mapping[str, "Rule | Section"]
    optional: bool = False


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
    if isinstance(rule, Rule):
        if not rule.accepts(value):
            raise ValueError(f"{name} must be {rule.allowed}, not {reprlib.repr(value)}")
        return value
    if value is None and rule.optional:
        return None
    if not isinstance(value, Mapping):
        keys = ", ".join(rule.keys)
        raise ValueError(f"{name} must be a mapping of {keys}, not {reprlib.repr(value)}")
    if unknown := [key for key in value if key not in rule.keys]:
        close = difflib.get_close_matches(str(unknown[0]), rule.keys, n=1)
        hint = f"did you mean {close[0]}? Allowed" if close else "allowed"
        raise ValueError(f"{name} has the key {unknown[0]!r}, {hint} are {', '.join(rule.keys)}")
    within = "" if rule is CONFIG else f"{name}."
    return {key: _entry(f"{within}{key}", value, key, part) for key, part in rule.keys.items()}


def _entry(name: str, section: Mapping[str, Any], key: str, rule: Rule | Section) -> Any:
    if key in section:
        return _check(name, section[key], rule)
    if isinstance(rule, Section):
        return None if rule.optional else _check(name, {}, rule)
    if rule.default is REQUIRED:
        raise ValueError(f"{name} is missing, it must be {rule.allowed}")
    return copy.copy(rule.default)


def _check_together(config: Mapping[str, Any]) -> None:
    """Raise ValueError if keys contradict each other."""
    if taken := {"loss", "loss_std"} & config["metrics"].keys():
        raise ValueError(
            f"a metric cannot be named {taken.pop()}, which is a name in the results: rename it"
        )
    device = config["training"]["device"]
    for name, report in (("training", ""), ("validation", "validator"), ("testing", "tester")):
        section = config[name]
        if section["prefetch_factor"] is not None and not section["num_workers"]:
            raise ValueError(f"{name}.prefetch_factor needs num_workers above 0, not 0")
        if report and section["data"] and section["fraction"] is not None:
            raise ValueError(f"{name} has both data and fraction: remove one of them")
        if report and section[report]["device"] not in (None, device):
            raise ValueError(
                f"{name}.{report}.device must be training.device, {device!r}, "
                f"not {section[report]['device']!r}"
            )


def _count(least: int = 1, default: Any = REQUIRED, most: int = 2**31 - 1) -> Rule:
    def accepts(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    return Rule(f"an integer from {least} to {most}", accepts, default)


def _number(allowed: str, accepts: Callable[[float], bool]) -> Rule:
    return Rule(allowed, lambda value: type(value) in (int, float) and accepts(value))


def _flag(default: bool) -> Rule:
    return Rule("true or false", lambda value: isinstance(value, bool), default)


def _one_of(*values: str) -> Rule:
    return Rule(" or ".join(values), lambda value: value in values, values[0])


def _or_null(rule: Rule, default: Any = None) -> Rule:
    return Rule(f"{rule.allowed}, or null", lambda v: v is None or rule.accepts(v), default)


def _is_device(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(torch.device(value.replace("gpu", "cuda")))
    except RuntimeError:
        return False


def _is_port(value: Any) -> bool:
    digits = str(value)
    return type(value) in (int, str) and digits.isdecimal() and 0 < int(digits) < 2**16


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _are_functions(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(callable, value.values()))


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


TEXT = Rule("a string", lambda value: isinstance(value, str))
LIST = Rule("a list", lambda value: isinstance(value, list), [])
KWARGS = Rule("a mapping of names", _is_named, {})
FUNCTION = Rule("a function, by !pyobject", callable)
DEVICE = _or_null(Rule('a device, such as "cpu", "cuda" or "cuda:1"', _is_device))
TYPE = Rule("a class or function, by !pyobject", callable)
STOPPING = Rule(
    f'"{DEFAULT_STOPPING}" or a class, by !pyobject',
    lambda value: callable(value) or value == DEFAULT_STOPPING,
)
OBJECT: Keys = {"type": TYPE, "args": LIST, "kwargs": KWARGS}
LOADING: Keys = {
    "num_workers": _count(0, 0),
    "pin_memory": _flag(False),
    "prefetch_factor": _or_null(_count()),
}
EVALUATION: Keys = LOADING | {
    "batch_size": _or_null(_count()),
    "data": Section(OBJECT, optional=True),
    "fraction": _or_null(_number("a number from 0 to 1", lambda value: 0 <= value < 1)),
    "drop_last": Rule(
        "false, because every item is evaluated", lambda value: value is False, False
    ),
}
PARALLEL: Keys = {
    "world_size": _or_null(_count()),
    "rank": _or_null(_count(0)),
    "master_addr": _or_null(TEXT),
    "master_port": _or_null(Rule("a port from 1 to 65535", _is_port)),
    "timeout": _or_null(_number("seconds, from 1 to a year", lambda v: 1 <= v <= 365 * 86_400)),
    "output_device": _or_null(_count(0)),
    "find_unused_parameters": _or_null(_flag(False)),
}
TRAINING: Keys = LOADING | {
    "seed": _count(0, 0, most=2**63 - 1),
    "device": DEVICE,
    "path": _or_null(TEXT),
    "num_epochs": _count(),
    "batch_size": _count(),
    "optimizer_type": Rule("an optimizer, by !pyobject", _is_optimizer),
    "optimizer_args": LIST,
    "optimizer_kwargs": KWARGS,
    "scheduler": Section(OBJECT | {"every": _one_of("epoch", "step")}, optional=True),
    "collate_fn": _or_null(FUNCTION),  # of validation and testing as well
    "forward": _or_null(FUNCTION),
    "count": _or_null(FUNCTION),
    "drop_last": _flag(False),
    "checkpoint_at": _or_null(_count(), 1),
    "accumulate": _count(1, 1),
    "clip_norm": _or_null(_number("a number above 0", lambda value: value > 0)),
    "precision": _one_of("fp32", "bf16", "fp16"),
    "on_nonfinite": _one_of("raise", "skip"),
    "sync_every": _count(1, 10),
}
CONFIG = Section(
    {
        "data": Section(OBJECT),
        "model": Section(OBJECT),
        "criterion": FUNCTION,
        "metrics": Rule("a mapping of names to functions, by !pyobject", _are_functions, {}),
        "parallel": Section(PARALLEL),
        "training": Section(TRAINING),
        "validation": Section(EVALUATION | {"validator": Section({"device": DEVICE})}),
        "testing": Section(EVALUATION | {"tester": Section({"device": DEVICE})}),
        "early_stopping": Section(OBJECT | {"type": STOPPING}, optional=True),
        "callbacks": LIST,
    }
)
