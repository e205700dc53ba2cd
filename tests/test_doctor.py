"""`python -m ddp_ref doctor` names what is wrong, and the way out, and exits with 1 for it."""

import ipaddress
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness import run, torchrun

from ddp_ref import doctor
from ddp_ref.environment import LaunchInfo, detect_launch

COMMAND = (sys.executable, "-m", "ddp_ref", "doctor")
CHECKS = ["platform", "launch", "backends", "devices", "master", "port", "interface", "gloo"]
ALONE = LaunchInfo(launcher="none", reason="a test")
TWO_NODES = LaunchInfo(
    launcher="slurm",
    reason="a test",
    world_size=2,
    nnodes=2,
    master_addr="127.0.0.1",
    master_port=29999,
)


def test_a_line_a_check(tmp_path):
    result = run(*COMMAND, cwd=tmp_path)
    assert result.code == 0, result.stdout + result.stderr
    words = [line.split() for line in result.stdout.splitlines()]
    assert [check for _, check, *_ in words if check != "nccl"] == [*CHECKS, "write"]
    assert {level for level, *_ in words} <= {"ok", "warning"}
    assert "none: rank 0 of 1" in result.stdout
    assert " ms, of 25 MiB " in result.stdout
    assert not list(tmp_path.glob(".ddp_ref*"))


def test_a_problem_is_exit_code_1(tmp_path):
    """A part of torchrun's variables, and NCCL's way to name interfaces, which gloo cannot read."""
    environment = {"RANK": "0", "GLOO_SOCKET_IFNAME": "^lo"}
    result = run(*COMMAND, "--json", cwd=tmp_path, env=environment)
    assert result.code == 1
    found = {finding["check"]: finding for finding in json.loads(result.stdout)}
    for check, says in [
        ("launch", "LOCAL_RANK, WORLD_SIZE not set"),
        ("interface", "GLOO_SOCKET_IFNAME=^lo is not here"),
        ("gloo", "two local ranks failed"),
    ]:
        assert found[check]["level"] == "problem"
        assert says in found[check]["text"]
        assert found[check]["way_out"]
    assert found["write"]["level"] == "ok"  # one problem does not hide the next


def test_under_torchrun_each_rank_reports(tmp_path):
    result = run(*torchrun(2, "-m", "ddp_ref", "doctor"), cwd=tmp_path)
    assert result.code == 0, result.stderr
    for rank in range(2):
        assert f"torchrun: rank {rank} of 2, local rank {rank} of 2, 1 node" in result.stdout


def test_a_check_that_fails_hides_no_other(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", f"{'x' * 70}.org")  # a name that no host may have
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr(doctor, "_all_reduces", lambda: iter(()))
    monkeypatch.setattr(doctor, "_address", lambda name: ipaddress.ip_address(name))
    levels = {finding.check: finding.level for finding in doctor.find()}
    assert levels["master"] == "problem" and levels["port"] == levels["write"] == "ok"


def test_a_reader_that_has_seen_enough(tmp_path):
    command = f"{sys.executable} -m ddp_ref doctor | head -1"
    result = run("bash", "-c", command, cwd=tmp_path)
    assert result.stdout.startswith("ok       platform") and result.stderr == ""


def test_master_that_does_not_resolve():
    launch = LaunchInfo(launcher="none", reason="a test", master_addr="no.such.host.invalid")
    level, _, text, way_out = doctor._master(launch)
    assert level == "problem" and "no.such.host.invalid does not resolve" in text
    assert "MASTER_ADDR" in way_out


def test_loopback_is_no_master_for_two_nodes():
    assert doctor._master(TWO_NODES).level == "problem"
    assert doctor._master(ALONE).level == "ok"
    assert doctor._master(replace(TWO_NODES, master_addr="::1")).level == "problem"
    assert doctor._master(replace(TWO_NODES, master_addr="::1", nnodes=1)).level == "ok"


def test_a_host_that_does_not_know_its_own_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")
    assert doctor._master(ALONE).level == "warning"  # nothing here needs the name


def test_a_launch_by_hand_needs_its_own_port(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert doctor._port(detect_launch()).level == "problem"
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # torchrun's agent holds it
        assert doctor._port(detect_launch()).level == "ok"


def test_port_in_use():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        busy = replace(TWO_NODES, master_port=port)
        level, _, text, way_out = doctor._port(busy)
    assert level == "problem" and str(port) in text and "MASTER_PORT" in way_out
    assert doctor._port(busy).level == "ok"  # free again


@pytest.mark.parametrize("tasks", ["4", "x"])
def test_slurm_job_without_a_step_is_a_warning(monkeypatch, tasks):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", tasks)
    level, _, text, way_out = doctor._launch(detect_launch())
    assert level == "warning" and "SLURM_NTASKS" in text and "srun" in way_out


@pytest.mark.parametrize(("gpus", "level"), [(0, "ok"), (1, "warning"), (2, "ok")])
def test_devices_against_local_ranks(monkeypatch, gpus, level):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    two = LaunchInfo(launcher="torchrun", reason="a test", world_size=2, local_world_size=2)
    found = doctor._devices(two)
    assert found.level == level
    assert f"{gpus} visible GPU" in found.text and "2 local ranks" in found.text
    four = replace(two, launcher="slurm", world_size=4, local_world_size=4)
    assert doctor._devices(four).level == {0: "ok", 1: "ok", 2: "warning"}[gpus]


def test_a_folder_that_takes_no_file(monkeypatch):
    monkeypatch.chdir(Path("/proc"))
    found = doctor._write()
    assert found.level == "problem" and found.way_out
