"""Run the fences of a page in one namespace. Each is a file named by a line of standard input."""

import os
import sys
import traceback
from pathlib import Path
from types import ModuleType


def main() -> None:
    os.dup2(1, 2)  # a reader of the page sees both
    names = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what a fence starts must not read the names
    os.chdir(sys.argv.pop())
    sys.path[0] = ""
    module = sys.modules["__main__"] = ModuleType("__main__")
    for name in names:
        path = Path(name.strip())
        code = 0
        try:
            exec(compile(path.read_text(), path, "exec"), vars(module))
        except BaseException as error:  # noqa: BLE001 - SystemExit too: more fences may follow
            code = 1
            traceback.print_exception(type(error), error, error.__traceback__.tb_next)
        print(f"\n@@ {code} {path.name}", flush=True)


main()
