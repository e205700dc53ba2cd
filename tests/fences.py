"""Run every fence of a page, and compare what it prints with what the page shows.

A `python` fence runs in the page's own interpreter. The fence after it shows what it prints, if
that is a `text` fence, or a `console` fence without a command. In a `console` fence, the lines that
begin with "$ " run in one session of bash, and each is followed by what it prints. A fence that
begins with a file's name in a comment, such as `# train.py`, is written to that file. In an output,
"..." stands for anything. A fence that cannot run has a row in tests/not_executed.md. Directives of
the site are skipped, because building the site runs them.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import ROOT, Running, run
from sybil import Document, Example, Region
from sybil.example import SybilFailure
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer
from warm_shell import FOLDER

NOT_EXECUTED = ROOT / "tests" / "not_executed.md"
LEXER = RawFencedCodeBlockLexer(re.compile(r"(?P<language>[^\n]*)\n"))
FILE_NAME = re.compile(r"# ([\w./-]+\.\w+)\n")
ROW = re.compile(
    r"\| \[[^]]+\]\((?P<page>[^)]+)\) \| `(?P<begins>[^|]+)` \| [^|]+ \| (?P<test>.+) \|"
)
DIRECTIVES = ("{eval-rst}", "{literalinclude}")
PROJECT = ("Makefile", "datautils.py", "notebooks", "scripts", "src")
LIMIT = 240.0  # seconds for a fence


def pages() -> list[Path]:
    """Return the pages whose fences are run."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def not_executed() -> list[tuple[Path, str, str]]:
    """Return each row of the table: the page, how the fence begins, and what covers it instead."""
    folder, rows = NOT_EXECUTED.parent, ROW.finditer(NOT_EXECUTED.read_text())
    return [((folder / row["page"]).resolve(), row["begins"], row["test"]) for row in rows]


def run_page(path: Path) -> None:
    """Run the fences of the page `path` in order. Raise if one does not print what is shown."""
    begins = [start for page, start, _ in not_executed() if page == path.resolve()]
    document = Document.parse(str(path), partial(parse, left_out=begins))
    examples = list(document)
    if not examples:
        return
    with TemporaryDirectory(prefix="page-") as folder, Session(Path(folder)) as session:
        document.namespace["session"] = session
        for example in examples:
            example.evaluate()


def parse(document: Document, left_out: list[str]) -> Iterator[Region]:
    """Yield the fences to run. Raise ValueError if an entry of `left_out` leaves out no fence."""
    unused, before = list(left_out), None
    for region in LEXER(document):
        language, source = region.lexemes["language"].strip(), region.lexemes["source"]
        if language.startswith(DIRECTIVES):
            continue
        listed = next((start for start in unused if source.startswith(start)), None)
        if listed:
            unused.remove(listed)
        if is_output(region) and before is not None and not listed:
            before.parsed, before = source, None
            continue
        before = region if language == "python" and not FILE_NAME.match(source) else None
        if not listed:
            region.evaluator = evaluator(region)
            yield region
    if unused:
        raise ValueError(f"{document.path}: listed as not executed, but not there: {unused}")


def is_output(region: Region) -> bool:
    """Return whether a fence only shows what the one before it prints."""
    language, source = region.lexemes["language"].strip(), region.lexemes["source"]
    return language == "text" or (language == "console" and not source.startswith("$ "))


def evaluator(region: Region):
    """Return the function that runs a fence of this language."""
    language = region.lexemes["language"].strip()
    if FILE_NAME.match(region.lexemes["source"]):
        return write_file
    if is_output(region):
        return lambda example: "no python fence before it prints this"
    runner = {"python": run_python, "console": run_console}.get(language)
    return runner or (lambda example: f"{language!r} cannot be run: list it in {NOT_EXECUTED.name}")


def write_file(example: Example) -> None:
    """Write a fence to the file that its first line names."""
    source = example.region.lexemes["source"]
    name = FILE_NAME.match(source)
    assert name
    path = example.namespace["session"].folder / name[1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


def run_python(example: Example) -> str | None:
    """Run a fence in the page's interpreter. Return what is wrong, or None."""
    code, printed = example.namespace["session"].python(example.region.lexemes["source"], example)
    if code:
        return f"it raises:\n{printed}"
    return difference(example.region.parsed or "", printed)


def run_console(example: Example) -> str | None:
    """Run the commands of a fence. Return what is wrong with the first wrong one, or None."""
    source = example.region.lexemes["source"].replace("\\\n", "\\\0")
    steps = [step.partition("\n") for step in re.split(r"^\$ ", source, flags=re.MULTILINE)[1:]]
    commands = [command.replace("\0", "\n") for command, _, _ in steps]
    results = example.namespace["session"].bash(commands)
    for command, (_, _, shown), (code, printed) in zip(commands, steps, results, strict=True):
        wrong = difference(shown, printed)
        # A command may fail if the last line that the page shows for it is an error.
        if not wrong and code and "rror" not in tidy(shown).rpartition("\n")[2]:
            wrong = f"exit code {code}:\n{printed}"
        if wrong:
            return f"$ {command}\n{wrong}"
    return None


def difference(shown: str, printed: str) -> str | None:
    """Return how `printed` differs from `shown`, where "..." stands for anything, or None."""
    shown, printed = tidy(shown), tidy(printed)
    blocks = [".*".join(map(re.escape, block.split("..."))) for block in shown.split("\n...\n")]
    pattern = r"\n(?:.*\n)?".join(blocks)  # a line "..." stands for any lines, or none
    if re.fullmatch(pattern, printed, re.DOTALL):
        return None
    return f"it prints:\n{printed}\n\nthe page shows:\n{shown}"


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


class Session:
    """A folder that looks like the project's root, and the interpreter of one page."""

    def __init__(self, folder: Path) -> None:
        self.work, self.folder = folder, folder / "page"
        self.folder.mkdir()
        for name in PROJECT:
            (self.folder / name).symlink_to(ROOT / name)
        (self.folder / ".venv").symlink_to(sys.prefix)
        own = str(Path(sys.prefix, "bin"))
        self.environment = {
            "PATH": os.pathsep.join([os.environ.get(FOLDER, own), own, os.environ["PATH"]]),
            "CUDA_VISIBLE_DEVICES": "",  # the same output on every machine
            "MPLBACKEND": "agg",
        }
        self.interpreter: Running | None = None
        self.read = 0  # how much of its output has been read

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if self.interpreter is None:
            return
        self.interpreter.process.stdin.close()  # then it exits
        try:
            if kind is None:
                self.interpreter.wait(LIMIT)
        finally:
            self.interpreter.__exit__(kind)

    def python(self, source: str, example: Example) -> tuple[int, str]:
        """Run `source` with the line numbers of its page. Return 0 or 1, and what it prints."""
        name = f"{Path(example.path).stem}_{example.line}.py"
        (self.work / name).write_text("\n" * example.line + source)
        if self.interpreter is None:
            command = [sys.executable, ROOT / "tests" / "fence_interpreter.py", self.folder]
            self.interpreter = Running(
                *command, cwd=self.work, env=self.environment, stdin=subprocess.PIPE
            )
        self.interpreter.process.stdin.write(f"{self.work / name}\n".encode())
        self.interpreter.process.stdin.flush()
        self.interpreter.wait_for(f" {name}\n", LIMIT)
        text = self.interpreter.out.read_text()
        printed, _, code = text[self.read :].rpartition("\n@@ ")
        self.read = len(text)
        return int(code[0]), printed

    def bash(self, commands: list[str]) -> list[tuple[int, str]]:
        """Run `commands` in one session. Return the exit code and the output of each."""
        lines = ["exec 2>&1", f"cd {self.folder.name}"]
        for command in commands:
            lines += [command, r"printf '\n@@ %d\n' $?"]
        (self.work / "session.sh").write_text("\n".join([*lines, ""]))
        ended = run("bash", "session.sh", cwd=self.work, env=self.environment, timeout=LIMIT)
        *parts, rest = re.split(r"\n@@ (\d+)\n", ended.stdout)
        assert len(parts) == 2 * len(commands), f"the session ended within its commands: {rest}"
        return [(int(code), text) for text, code in zip(parts[::2], parts[1::2], strict=True)]


__all__ = ["SybilFailure", "not_executed", "pages", "run_page"]
