"""Draw the map of the course and the imports of src/ddp_ref: `python docs/figures/draw.py`.

Titles, line counts and arrows come from the files; only the places of the boxes are written here.
"""

import ast
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "tests"))
from lines_of_code import lines_of_code  # noqa: E402

LOOK = (HERE / "one_step.svg").read_text("utf-8")  # its colours and its arrow
MORE = """<style>
    text { font-size: 15px }
    .strong { fill: #59636e; stroke: #8c959f }
    .middle { fill: #dbe1e7; stroke: #8c959f }
    .line { stroke-width: 1.5 }
    @media (prefers-color-scheme: dark) { .middle { fill: #3d444d; stroke: #7d8590 } }
  </style>"""
PACKAGE = {path.stem: path.read_text("utf-8") for path in sorted(ROOT.glob("src/ddp_ref/*.py"))}


def cut(pattern, text):
    return re.findall(pattern, text)[0]


def svg(title, desc, height, body):
    size = f'viewBox="0 0 600 {height}" width="600" height="{height}" role="img"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} aria-labelledby="title desc">']
    parts += [f'<title id="title">{title}</title>', f'<desc id="desc">{desc}</desc>']
    parts += [cut(r"(?s)(<style>.*?</style>)", LOOK), MORE]
    parts += ["<defs>", cut(r"(?s)(<marker.*?</marker>)", LOOK), "</defs>"]
    parts += [f'<rect class="panel" x="1" y="1" width="598" height="{height - 2}" rx="12"/>']
    return "\n  ".join([*parts, text(14, 32, title, kind="title"), *body]) + "\n</svg>\n"


def text(x, y, first="", then="", kind="bold", soft="soft"):
    spans = [f'<tspan class="{name}">{t}</tspan>' for t, name in ((first, kind), (then, soft)) if t]
    return f'<text x="{x}" y="{y}">{" ".join(spans)}</text>'


def box(left, top, right, bottom, kind, *lines, bold="bold"):
    """Draw a box around lines of text, of which each has a first part and a softer one."""
    size = f'width="{right - left}" height="{bottom - top}"'
    body = [f'<rect class="{kind}" x="{left}" y="{top}" {size} rx="6"/>']
    ink = ("bold light-text", "light-text") if kind == "strong" else (bold, "soft")
    y = (top + bottom - 19 * (len(lines) - 1)) // 2 + 5
    return body + [text(left + 8, y + 19 * row, *line, *ink) for row, line in enumerate(lines)]


def line(path, kind="line", end=' marker-end="url(#arrow)"'):
    return f'<path class="{kind}" d="{path}"{end}/>'


# The map: from top to bottom the chapters; left of each what you run, and right what you write.
RUNGS = {1: "single_gpu", 2: "multigpu_spawn", 3: "multigpu_torchrun", 4: "multinode_slurm"}
RUNGS[9] = "train_reference"
STAGES = {2: ["1 all-reduce", "2 naive DDP"], 5: ["3 full step"], 7: ["4 buckets"]}
STAGES[10] = ["5 ZeRO-2", "6 FSDP block"]
PAGES = {"how to": ("launch, copy", "docs/how-to/"), "look up": ("errors, terms", "docs/")}
PAGES["evidence"] = ("numbers", "docs/evidence.md")
MAP = """Chapters 00 to 10 from top to bottom; start with 00. Left of 01, 02, 03, 04 and 09 are the
scripts that they explain, with their lines: the ladder from single_gpu to train_reference, which
uses src/ddp_ref. Below multigpu_torchrun is elastic. Right of 02, 05, 07 and 10 are the six stages
of notebooks/myddp.py, which you write. At the bottom are the pages: how to, look up, evidence."""


def script(name):
    return name, len((ROOT / f"scripts/{name}.py").read_text("utf-8").splitlines())


def course():
    body = [text(14, 62, "run", "scripts/*.py, lines"), text(222, 62, "read", "notebooks/")]
    body += [text(472, 62, "write"), text(472, 82, "", "notebooks/")]
    body += [text(472, 101, "", "myddp.py"), text(98, 94, "start here"), line("M188 89H219")]
    top, rung, stage = 74, 0, 0
    for number, chapter in enumerate(sorted(ROOT.glob("notebooks/[01]*.md"))):
        title = cut(r"(?m)^# \d\d (.+?)(?: and learning rate)?$", chapter.read_text("utf-8"))
        bottom = top + (56 if number in (2, 3, 9, 10) else 30)
        half, middle = (top + 26 if number in (3, 9) else bottom), (top + bottom) // 2
        body += [*box(222, top, 454, bottom, "card"), text(262, middle + 5, title, kind="name")]
        body += box(222, top, 256, bottom, "strong", (f"{number:02}", ""))
        body += [line(f"M239 {bottom}v14")] if number < 10 else []
        if number in RUNGS:
            body += [line(f"M26 {rung}V{top}")] if rung else []
            body += [line(f"M204 {(top + half) // 2}h18", end="")]
            body += box(14, top, 204, half, "card", script(RUNGS[number]), bold="name")
            rung = half
        if number in STAGES:
            body += [line(f"M529 {stage}V{top}")] if stage else []
            body += [line(f"M454 {middle}h18", end="")]
            parts = [(part, "") for part in STAGES[number]]
            body += box(472, top, 586, bottom, "dash", *parts, bold="name")
            stage = bottom
        if number == 3:
            body += box(40, top + 30, 204, bottom, "card", script("elastic"), bold="name")
        if number == 9:
            files = f"{len(PACKAGE)} files"
            body += box(14, top + 30, 204, bottom, "strong", ("src/ddp_ref", files))
        top = bottom + 14
    for left, (use, (what, where)) in zip((14, 208, 402), PAGES.items(), strict=True):
        body += box(left, top + 6, left + 184, top + 56, "middle", (use, what), ("", where))
    return svg("The course on one page", MAP, top + 70, body)


# The imports: left end, right end and row of each file's box, and what the file is for.
PLACES = {
    "trainer": (14, 434, 0, "TrainerDDP: all of it, from a YAML file"),
    "workers": (444, 586, 0, "run_ranks"),
    "handler": (14, 500, 1, "Handler: trains, evaluates, saves and resumes"),
    "agreement": (14, 310, 2, "equal settings, data and weights?"),
    "figures": (320, 434, 2, "plots"),
    "decorators": (444, 586, 2, "on_rank"),
    "data": (14, 216, 3, "batches of each rank"),
    "callbacks": (226, 490, 3, "hooks, early stopping"),
    "signals": (46, 156, 4, "SIGTERM"),
    "settings": (166, 320, 4, "checked first"),
    "checkpoint": (330, 490, 4, "saves and reads"),
    "randomness": (14, 156, 5, "seeds"),
    "metrics": (166, 284, 5, "sums, counts"),
    "model": (294, 490, 5, "wrap_model"),
    "collectives": (166, 586, 6, "sums, gathers and broadcasts over all ranks"),
    "initialize": (166, 586, 7, "opens and closes the process group"),
    "launch": (166, 586, 8, "rank and world size, under any launcher"),
}
KINDS = {"strong": "everything", "middle": "your own loop", "card": "Handler"}
KINDS["dash"] = "no other file"


def imports(code):
    """Return which files a file imports, except for types, and whether it always does."""
    found: dict[str, bool] = {}
    tree = ast.parse(code)
    types = [node for part in tree.body if isinstance(part, ast.If) for node in ast.walk(part)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and node not in types:
            for name in [node.module] if node.module else [alias.name for alias in node.names]:
                found[name] = found.get(name, False) or node in tree.body
    return found


def closure(name, graph):
    """Return a file, and all files that it cannot do without."""
    return {name}.union(*(closure(other, graph) for other, always in graph[name].items() if always))


def package():
    graph = {name: imports(code) for name, code in PACKAGE.items() if name != "__init__"}
    imported = {name for found in graph.values() for name, always in found.items() if always}
    kinds = {name: "card" if name in imported else "dash" for name in graph}
    kinds |= dict.fromkeys(closure("data", graph) | closure("model", graph), "middle")
    kinds |= dict.fromkeys(closure("decorators", graph) | closure("randomness", graph), "strong")
    about = f"{len(PACKAGE)} files with __init__; the numbers are their lines of code"
    body = [text(14, 58, "", about), text(14, 498, "needed for")]
    body += [text(14, 693, "", "An arrow leads to what a file imports. If a longer way also leads")]
    body += [text(14, 713, "", "there, the arrow is left out.")]
    for y, (kind, use) in zip(range(512, 640, 32), KINDS.items(), strict=True):
        body += [*box(14, y, 34, y + 20, kind), text(42, y + 15, "", use)]
    says = []
    for name, found in graph.items():
        left, right, row, use = PLACES[name]
        y, words = 76 + 68 * row, [(name, lines_of_code(PACKAGE[name])), ("", use)]
        body += box(left, y, right, y + 46, kinds[name], *words)
        always = {name for name in found if found[name]}
        nearest = {o for o in found if not any(o in closure(v, graph) for v in always - {o})}
        says += [f"{name} imports {', '.join(sorted(nearest))}."] if nearest else []
        for other in sorted(nearest):
            first, last, below, _ = PLACES[other]
            passed = [(a, b) for a, b, between, _ in PLACES.values() if row < between < below]
            xs = range(max(left, first) + 8, min(right, last) - 7)
            free = [x for x in xs if row < below and all(not a - 8 < x < b + 8 for a, b in passed)]
            assert free, f"{name} imports {other}, but no arrow leads straight down: move a box"
            path = f"M{free[len(free) // 2]} {y + 46}V{76 + 68 * below}"
            body += [line(path, "line" if found[other] else "dash")]
    return svg("What imports what in src/ddp_ref", " ".join(says), 728, body)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else HERE
    for draw in (course, package):
        (folder / f"{draw.__name__}.svg").write_text(draw(), "utf-8", newline="\n")
