"""The reader's file: it keeps what is right, has solutions for the rest, and is measured."""

import linecache
import subprocess

import pytest
from lesson import myddp, score


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(myddp, "KEPT", tmp_path / "kept.py")
    return tmp_path / "kept.py"


def defined_in_a_cell(code, name):
    linecache.cache["cell"] = len(code), None, code.splitlines(keepends=True), "cell"
    names = {}
    exec(compile(code, "cell", "exec"), names)
    return names[name]


def test_a_right_answer_takes_the_place_of_the_solution(kept, tmp_path):
    function = defined_in_a_cell("def token_step(*args):\n    return 'mine'\n", "token_step")
    myddp.keep(function)
    myddp.keep(defined_in_a_cell("class Buckets:\n    def ready(self): ...\n", "Buckets"))
    assert [*myddp.definitions(kept.read_text())] == ["Ring", "token_step", "Buckets"]
    whole = myddp.definitions((tmp_path / "myddp.py").read_text())
    names = [name for stage in myddp.STAGES.values() for name in stage]
    assert [*whole] == ["Ring", *names]
    assert whole["token_step"].endswith("return 'mine'") and "ready(self): ..." in whole["Buckets"]
    assert myddp.load().token_step() == "mine"


def test_imports_and_helpers_of_the_cell_are_kept(kept):
    code = """from contextlib import nullcontext
from exercises import check

def twice(number):
    return 2 * number

def start_alike(model):
    return NotImplemented

def token_step(*args):
    with nullcontext():
        return twice(4)
"""
    myddp.keep(defined_in_a_cell(code, "token_step"))
    assert myddp.load().token_step() == 8
    text = kept.read_text()
    assert text.count("from contextlib import nullcontext\n") == 1
    assert "start_alike" not in text and "exercises" not in text


@pytest.mark.full
def test_a_stage_is_measured_beside_pytorch_and_the_prediction(kept, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(score, "TABLE", tmp_path / "table.json")
    drawn = []
    monkeypatch.setattr(score, "_draw", drawn.extend)
    if subprocess.run(["unshare", "--map-root-user", "--net", "true"]).returncode:
        pytest.skip("no user namespaces here, so no network of our own to slow down")
    score.show(5)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [row[0].split()[1] for row in rows] == ["predicted", "yours", "PyTorch's"]
    predicted, yours, torchs = rows
    assert 1 < float(yours[3]) / float(predicted[3]) < 1.1  # bytes, with the headers of TCP
    assert float(predicted[1]) / 3 < float(yours[1]) < 5 * float(predicted[1])
    assert float(yours[4]) < 9 and float(torchs[4]) > 11  # bytes per weight: ZeRO-2, ZeRO-1
    assert all(rank["sends"] and rank["waits"] for rank in drawn)
