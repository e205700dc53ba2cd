"""Run the script DRILL_SCRIPT unchanged, but let a rank wait for the drill at DRILL_MOMENT.

DRILL_DEFECT is code that breaks the job first: a test shows that the drill finds it.
The script runs in this module's namespace, so its spawned processes import this module, too.
"""

import os
from pathlib import Path

import moment

exec(os.environ.get("DRILL_DEFECT", ""))
moment.arm()
SCRIPT = Path(os.environ["DRILL_SCRIPT"])
exec(compile(SCRIPT.read_text(encoding="utf-8"), SCRIPT, "exec"))
