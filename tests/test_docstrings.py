"""The package documents the arguments of what it exports."""

import inspect

from harness import public_names

import ddp_ref


def exported_functions():
    """Yield the name, the object and the docstring of each function, class and method exported."""
    for name in public_names():
        exported = getattr(ddp_ref, name)
        if not inspect.isclass(exported):
            yield name, exported, exported.__doc__ or ""
            continue
        if issubclass(exported, Exception):  # nobody but the package creates one
            continue
        yield name, exported, f"{exported.__doc__}{exported.__init__.__doc__}"
        for method, function in inspect.getmembers(exported, inspect.isfunction):
            if not method.startswith("_"):
                yield f"{name}.{method}", function, function.__doc__ or ""


def test_the_reference_lists_all_arguments():
    missing = []
    for name, function, text in exported_functions():
        arguments = text.partition("Args:")[2] or text.partition("Attributes:")[2]
        for parameter in inspect.signature(function).parameters:
            if parameter != "self" and f" {parameter}:" not in arguments.replace("*", ""):
                missing.append(f"{name}: {parameter}")
    assert missing == []
