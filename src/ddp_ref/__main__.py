"""`python -m ddp_ref doctor`: say what this machine, and this launch, can run."""

import argparse
import os
import sys

from .doctor import doctor


def main() -> int:
    """Parse the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("doctor", help="check this machine; exit code 1 for a problem")
    command.add_argument("--json", action="store_true", help="print one JSON list of results")
    arguments = parser.parse_args()
    try:
        return doctor(as_json=arguments.json)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
