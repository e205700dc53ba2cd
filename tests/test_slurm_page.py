"""docs/slurm.md: its commands print what it shows, and every template has the included lines."""

import re

import pytest
from harness import ROOT, SCRIPTS, run
from slurm_cluster import project_folder
from test_differences import functions_in

PAGE = (ROOT / "docs" / "slurm.md").read_text()


def test_the_included_lines_are_in_every_template():
    templates = [path.read_text() for path in (SCRIPTS / "slurm").glob("*gpu_slurm_job.sh")]
    # The page quotes these lines, because an unquoted # begins a comment.
    included = re.findall(r"^:start-at: '(.+)'\n:end-at: '(.+)'$", PAGE, re.MULTILINE)
    assert (len(templates), len(included)) == (3, 3)
    for first, last in included:
        part = rf"^ *{re.escape(first)}.*?^ *{re.escape(last)}.*?$"
        matches = [re.findall(part, text, re.DOTALL | re.MULTILINE) for text in templates]
        assert len(matches[0]) == 1 and matches[0] == matches[1] == matches[2], first
    for text in templates:  # Slurm ignores a directive below the first command
        head, _, body = text.partition("\nPYTHON=")
        assert "#SBATCH --signal=B:USR1@120" in head and "#SBATCH" not in body


def test_the_rows_name_tests_that_exist():
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE)
    assert len(named) >= 10
    assert [name for file, name in named if name not in functions_in(file)] == []


@pytest.mark.slurm
def test_the_commands_print_what_the_page_shows(cluster, tmp_path):
    """One shell runs all commands. Each line shown must begin a line that its command prints."""
    folder = project_folder(tmp_path / "project")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (folder / name).symlink_to(ROOT / name)
    fences = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    page = "\n".join(fences).replace("local-cluster-ddp/", f"{cluster.state.name}/")
    steps = [part.split("\n") for part in re.split(r"^\$ ", page, flags=re.MULTILINE)[1:]]
    lines = ["exec 2>&1"]
    for number, (command, *_) in enumerate(steps):
        lines += [f"echo; echo @@ {number}", command]
    (folder / "page.sh").write_text("\n".join([*lines, "echo @@ end", "wait", ""]))
    ended = run("bash", "page.sh", cwd=folder, env=cluster.names, timeout=300)
    printed = re.split(r"^@@ \w+\n", ended.stdout, flags=re.MULTILINE)[1:]
    assert len(printed) == len(steps) + 1
    for (command, *shown), text in zip(steps, printed, strict=False):
        for line in filter(None, shown):
            assert re.search(f"^{re.escape(line)}", text, re.MULTILINE), (command, line, text)


def test_all_our_srun_commands_end_all_ranks_if_one_fails():
    """Handler leaves this to the launcher: an error ends only the process that raised it.

    Exceptions: a page shows an interactive shell as an example of what goes wrong, --overlap
    inspects a running job, and an elastic job goes on (--no-kill).
    """
    folders = ("scripts", "docs", "notebooks", "drill")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = []
    for file in [ROOT / "Makefile", ROOT / "README.md", *files]:
        if file.suffix in ("", ".md", ".py", ".sh"):
            text = file.read_text()
            calls = re.findall(r"\bsrun (?:[-$]|\.venv).*", text)
            calls += re.findall(r"options = .*\n.*\"srun\".*", text)
            found += [
                (file.name, c) for c in calls if not re.search("--pty|--overlap|--no-kill", c)
            ]
    assert len({name for name, _ in found}) >= 10
    assert [call for _, call in found if "--kill-on-bad-exit=1" not in call] == []
