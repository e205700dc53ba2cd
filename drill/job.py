"""Run the script of DRILL_SCRIPT as it is, but that a rank waits for the drill at DRILL_MOMENT.

The script's code runs as this module's own, and so in the processes that it spawns as well.
"""

import os
from pathlib import Path

import moment

moment.arm()
SCRIPT = Path(os.environ["DRILL_SCRIPT"])
exec(compile(SCRIPT.read_text(encoding="utf-8"), SCRIPT, "exec"))
