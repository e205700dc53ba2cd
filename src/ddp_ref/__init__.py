"""Data-parallel training with DistributedDataParallel: every public name of the package.

`__init__.pyi` lists the public names for this module, for type checkers and for editors. A name's
module is imported when the name is first used (PEP 562), so that `import ddp_ref` loads next to
nothing, and a project may copy only the folders that it needs.
"""

import ast
from importlib import import_module, resources
from typing import Any

_STUB = ast.parse(resources.files(__name__).joinpath("__init__.pyi").read_text(encoding="utf-8"))
_MODULES = {
    imported.name: f".{statement.module}"
    for statement in _STUB.body
    if isinstance(statement, ast.ImportFrom)
    for imported in statement.names
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
