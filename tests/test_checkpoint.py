"""A checkpoint is complete or rejected, whatever happened to the file or to its writer."""

import errno
import io
import math
import signal
import sys
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from harness import Evil, run
from hypothesis import example, given, settings, strategies as st
from torch import nn

from ddp_ref import checkpoint, initialize_ddp, run_ranks
from ddp_ref.agreement import check_replicas
from ddp_ref.checkpoint import DamagedCheckpoint

STATE = {"model": {"w": torch.arange(100.0)}, "epoch": 3, "history": [0.5, 0.25], "none": None}


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def test_a_written_state_is_read_back_and_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "new" / "folder" / "a.pt", tmp_path / "link.pt"
    link.symlink_to(target)
    for state in ({"old": 1}, STATE):
        checkpoint.write(link, state)
    assert link.is_symlink() and equal(checkpoint.read(target), STATE)
    assert [path.name for path in target.parent.iterdir()] == ["a.pt"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "a.pt"
    checkpoint.write(path, STATE)
    return path.read_bytes()


@settings(max_examples=100)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@example(place=0.8732644222687435, bit=4)  # makes the tensor's entry a directory
@example(place=0.97605, bit=7)  # moves the archive's start before the file's, where a seek fails
def test_a_flipped_bit_is_noticed_or_harmless(written, tmp_path_factory, place, bit):
    content = bytearray(written)
    content[int(place * len(content))] ^= 1 << bit
    path = tmp_path_factory.getbasetemp() / "flipped.pt"
    path.write_bytes(content)
    try:
        state = checkpoint.read(path)
    except DamagedCheckpoint as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert equal(state, STATE)  # a bit that nothing reads, such as a date


def test_the_error_says_why_a_file_is_not_a_checkpoint_and_no_code_of_it_is_run(tmp_path):
    path = tmp_path / "a.pt"
    torch.save([1], path)
    with pytest.raises(DamagedCheckpoint, match="has a list, but a checkpoint is a dict"):
        checkpoint.read(path)
    torch.save({"model": Evil(tmp_path / "attacked")}, path)
    with pytest.raises(DamagedCheckpoint, match="not a complete checkpoint"):
        checkpoint.read(path)
    assert not (tmp_path / "attacked").exists()


KILLED = """if True:
    import resource, signal, torch
    from ddp_ref import checkpoint
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    checkpoint.write("a.pt", {"w": torch.zeros(100_000)})
"""


def test_after_a_kill_during_a_save_the_old_file_is_intact(tmp_path):
    """The kernel kills the process when it has written 100 kB of 400."""
    checkpoint.write(tmp_path / "a.pt", STATE)
    ended = run(sys.executable, "-c", KILLED, cwd=tmp_path)
    assert ended.code == -signal.SIGXFSZ, ended.stderr
    assert (tmp_path / ".a.pt.tmp").stat().st_size == 100_000
    assert equal(checkpoint.read(tmp_path / "a.pt"), STATE)
    checkpoint.write(tmp_path / "a.pt", {"step": 2})
    assert checkpoint.read(tmp_path / "a.pt") == {"step": 2}
    assert [*tmp_path.glob("*a.pt*")] == [tmp_path / "a.pt"]  # the save has replaced what was left


def test_find_takes_the_newest_intact_checkpoint(tmp_path):
    assert checkpoint.find(tmp_path) is None
    assert checkpoint.find(tmp_path / "absent") is None
    with pytest.raises(FileNotFoundError):
        checkpoint.find(tmp_path / "absent.pt")
    for step in (9, 10, 11):
        checkpoint.write(tmp_path / f"step_{step}.pt", {"step": step})
    checkpoint.write(tmp_path / "best.pt", {"step": 99})
    checkpoint.write(tmp_path / "step_x.pt", {"step": 99})
    assert checkpoint.find(tmp_path) == (tmp_path / "step_11.pt", {"step": 11})
    (tmp_path / "step_11.pt").write_bytes(b"")
    content = (tmp_path / "step_10.pt").read_bytes()
    (tmp_path / "step_10.pt").write_bytes(content[:-99])
    with pytest.warns(UserWarning, match="trying the one before it") as caught:
        assert checkpoint.find(tmp_path) == (tmp_path / "step_9.pt", {"step": 9})
    assert len(caught) == 2
    (tmp_path / "step_9.pt").write_text("no")
    with (
        pytest.warns(UserWarning),
        pytest.raises(DamagedCheckpoint, match=r"all checkpoints .* move them away"),
    ):
        checkpoint.find(tmp_path)


def inner():
    """Return a model whose only child is called `module`, as DDP calls the model that it wraps."""
    return nn.Sequential(OrderedDict(module=nn.Linear(2, 3)))


def test_wrapped_compiled_and_plain_models_load_each_others_weights():
    def work():
        initialize_ddp(use_distributed=True)
        ddp = torch.nn.parallel.DistributedDataParallel
        wrappers = [lambda m: m, ddp, torch.compile, lambda m: torch.compile(ddp(m))]
        wrappers.append(lambda m: ddp(torch.compile(m)))
        expected = {name: torch.rand(value.shape) for name, value in inner().state_dict().items()}
        for save in wrappers:
            source = save(inner())
            checkpoint.load_weights(source, expected)
            plain = checkpoint.weights(source)
            assert plain.keys() == expected.keys()
            for load in wrappers:
                for state in (plain, source.state_dict()):  # ours, and what a plain torch.save has
                    target = load(inner())
                    checkpoint.load_weights(target, state)
                    loaded = checkpoint.weights(target)
                    assert all(torch.equal(loaded[name], expected[name]) for name in expected)

    run_ranks(work, nproc=1, timeout=timedelta(minutes=2))


def test_an_infinite_weight_is_found_and_an_infinite_buffer_is_not():
    model = nn.Linear(1, 3)
    model.register_buffer("mask", torch.tensor([0, -math.inf]))
    model.register_buffer("cache", torch.tensor([math.nan]), persistent=False)  # not saved
    checkpoint.weights(model)
    check_replicas(model, False)
    model.mask[0] = math.nan
    with pytest.raises(FloatingPointError, match="mask is not finite"):
        checkpoint.weights(model)
    model.bias.data[1] = math.inf
    with pytest.raises(FloatingPointError, match="bias is not finite"):
        check_replicas(model, False)


def test_a_full_disk_is_one_error_that_names_the_file_and_the_old_file_stays(tmp_path):
    checkpoint.write(tmp_path / "a.pt", STATE)
    (tmp_path / ".a.pt.tmp").symlink_to("/dev/full")  # where the file is written at first
    with pytest.raises(OSError, match=r"No space left on device.*/a\.pt"):
        checkpoint.write(tmp_path / "a.pt", {"step": 2})
    assert equal(checkpoint.read(tmp_path / "a.pt"), STATE)
    assert [*tmp_path.iterdir()] == [tmp_path / "a.pt"]


def test_a_nan_is_found_anywhere_in_a_weight():
    """Its norm is added up in blocks: 0 is before the first, 299 in one."""
    for place in (0, 299):
        model = nn.Linear(300, 1)
        model.weight.data[0, place] = math.nan
        with pytest.raises(FloatingPointError, match="weight is not finite"):
            check_replicas(model, False)


def test_a_disk_error_is_not_taken_for_a_damaged_file(tmp_path, monkeypatch):
    """Otherwise, an older checkpoint would be loaded."""

    class Failing(io.BytesIO):
        def read(self, *_):
            raise OSError(errno.EIO, "Input/output error")

    checkpoint.write(tmp_path / "step_1.pt", STATE)
    monkeypatch.setattr(Path, "open", lambda path, mode: Failing())
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.find(tmp_path)
