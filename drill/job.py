"""Run the script DRILL_SCRIPT unchanged, but let a rank wait for the drill at DRILL_MOMENT.

The script runs in this module's namespace, so its spawned processes import this module, too.
"""

import os
from pathlib import Path

import moment

moment.arm()
SCRIPT = Path(os.environ["DRILL_SCRIPT"])
exec(compile(SCRIPT.read_text(encoding="utf-8"), SCRIPT, "exec"))
