"""`python -m ddp_ref doctor` says what is wrong and what to do, and then exits with 1."""

import ipaddress
import json
import os
import socket
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import Running, run, torchrun

from ddp_ref import doctor, run_ranks
from ddp_ref.environment import LaunchInfo, detect_launch

COMMAND = (sys.executable, "-m", "ddp_ref", "doctor")
CHECKS = ["platform", "launch", "backends", "devices", "limits", "master", "port", "interface"]
CHECKS += ["gloo", "nccl", "write"]
ALONE = LaunchInfo(launcher="none", reason="a test")
TWO_NODES = LaunchInfo(
    launcher="slurm",
    reason="a test",
    world_size=2,
    nnodes=2,
    master_addr="127.0.0.1",
    master_port=29999,
)


def result(check, launch=ALONE):
    """Return what the report says about one check."""
    return doctor._run_check(check, launch)


def test_a_line_per_check_and_a_summary(tmp_path):
    """The doctor announces the slow check, so that nobody takes the wait for a hang."""
    with Running(*COMMAND, cwd=tmp_path) as running:
        running.wait_for("doctor: starting 2 gloo ranks, up to 45 s ...")
        assert "all-reduce" not in running.text()  # announced before the check, not with its result
        ended = running.wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    *lines, summary = ended.stdout.splitlines()
    words = [line.split() for line in lines]
    assert [check for _, check, *_ in words] == CHECKS
    levels = [level for level, *_ in words]
    assert {*levels} <= {"ok", "warning"}
    count = levels.count("warning")
    assert summary == (
        f"doctor: {levels.count('ok')} ok, {count} warning{'s' * (count != 1)}, 0 problems"
    )
    assert "launcher none: rank 0 of 1" in ended.stdout
    assert " ms for one number, " in ended.stdout
    assert not list(tmp_path.glob(".ddp_ref*"))


def test_a_problem_leads_to_exit_code_1(tmp_path):
    """Some of torchrun's variables are missing, and gloo does not understand NCCL's `^lo`."""
    environment = {"RANK": "0", "GLOO_SOCKET_IFNAME": "^lo"}
    ended = run(*COMMAND, "--json", cwd=tmp_path, env=environment)
    assert ended.code == 1
    report = {finding["check"]: finding for finding in json.loads(ended.stdout)}
    assert [*report] == CHECKS
    for check, says in [
        ("launch", "LOCAL_RANK, WORLD_SIZE not set"),
        ("interface", "GLOO_SOCKET_IFNAME=^lo, but there is only lo"),
        ("gloo", "^lo"),
    ]:
        assert report[check]["level"] == "problem"
        assert says in report[check]["text"]
        assert report[check]["advice"]
    assert report["write"]["level"] == "ok"  # the problems do not hide other results
    assert "starting 2 gloo ranks" in ended.stderr


def test_under_torchrun_each_rank_reports(tmp_path):
    result = run(*torchrun(2, "-m", "ddp_ref", "doctor"), cwd=tmp_path)
    assert result.code == 0, result.stderr
    for rank in range(2):
        assert (
            f"launcher torchrun: rank {rank} of 2, local rank {rank} of 2, 1 node" in result.stdout
        )
    assert result.stdout.count(" for 25 MiB\n") == 1  # only local rank 0 measures


def test_a_check_that_fails_does_not_hide_the_others(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", f"{'x' * 70}.org")  # a name that no host may have
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr(doctor, "_timed", lambda *_: "not now")
    monkeypatch.setattr(doctor, "_address", lambda name: ipaddress.ip_address(name))
    levels = {finding.check: finding.level for finding in doctor.run_checks()}
    assert levels["master"] == "problem" and levels["port"] == levels["write"] == "ok"


def test_a_reader_that_closes_the_pipe_causes_no_error(tmp_path):
    command = f"{sys.executable} -m ddp_ref doctor | head -1"
    result = run("bash", "-c", command, cwd=tmp_path)
    assert result.stdout.startswith("ok       platform") and "Error" not in result.stderr


def test_master_that_does_not_resolve():
    launch = LaunchInfo(launcher="none", reason="a test", master_addr="no.such.host.invalid")
    level, _, text, advice = result(doctor._master, launch)
    assert level == "problem" and "no.such.host.invalid, does not resolve" in text
    assert "MASTER_ADDR" in advice


def test_loopback_is_no_master_for_two_nodes():
    assert result(doctor._master, TWO_NODES).level == "problem"
    assert result(doctor._master, ALONE).level == "ok"
    assert result(doctor._master, replace(TWO_NODES, master_addr="::1")).level == "problem"
    assert result(doctor._master, replace(TWO_NODES, master_addr="::1", nnodes=1)).level == "ok"


def test_a_host_that_does_not_know_its_own_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")
    assert result(doctor._master, ALONE).level == "warning"  # nothing here needs the name


def test_a_launch_by_hand_needs_its_own_port(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert result(doctor._port, detect_launch()).level == "problem"
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # torchrun's agent holds it
        assert result(doctor._port, detect_launch()).level == "ok"


def test_port_in_use():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        busy = replace(TWO_NODES, master_port=port)
        level, _, text, advice = result(doctor._port, busy)
    assert level == "problem" and str(port) in text and "MASTER_PORT" in advice
    assert result(doctor._port, busy).level == "ok"  # free again


@pytest.mark.parametrize("tasks", ["4", "x"])
def test_slurm_job_without_a_step_is_a_warning(monkeypatch, tasks):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", tasks)
    level, _, text, advice = result(doctor._launch)
    assert level == "warning" and text.startswith(f"SLURM_NTASKS={tasks}, but srun did not start")
    assert "srun" in advice


@pytest.mark.parametrize(("gpus", "level"), [(0, "ok"), (1, "warning"), (2, "ok")])
def test_devices_against_local_ranks(monkeypatch, gpus, level):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "H100")
    two = LaunchInfo(launcher="torchrun", reason="a test", world_size=2, local_world_size=2)
    shown = result(doctor._devices, two)
    assert shown.level == level
    assert f"{gpus} visible GPU" in shown.text and "2 local ranks" in shown.text
    four = replace(two, launcher="slurm", world_size=4, local_world_size=4)
    assert result(doctor._devices, four).level == {0: "ok", 1: "ok", 2: "warning"}[gpus]


def fake_root(folder, files):
    """Write `files` (text by path), which the doctor then reads instead of the machine's own."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    "line",
    [
        "NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC 12.2.0",
        "NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build",
    ],
)
def test_names_of_gpus_and_driver(monkeypatch, tmp_path, line):
    driver = {"proc/driver/nvidia/version": f"NVRM version: {line}\n"}
    monkeypatch.setattr(doctor, "ROOT", fake_root(tmp_path, driver))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda i: ["H200", "A100", "A100"][i])
    text = result(doctor._devices).text
    assert text == "3 visible GPUs for 1 local rank (A100, H200, driver 550.54.15)"


def test_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    text = result(doctor._devices).text
    assert text == "0 visible GPUs for 1 local rank (no driver)"


VERSION_2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/cpu.max": "150000 100000\n",  # the parent's limit: it holds for the step too
    "sys/fs/cgroup/job/memory.max": f"{2**33}\n",
    "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
    "sys/fs/cgroup/job/step/memory.max": f"{2**32}\n",
}
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/\n0::/\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",  # no limit
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "200000\n",
    "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
}
# In a container with version 1, /proc/self/cgroup has the path on the host, but the folders begin
# at the container's own group.
CONTAINER = {
    "proc/self/cgroup": "4:memory:/docker/0123\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * 2**29}\n",
}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (VERSION_2, "CPU 1.5 cores, memory 4 GiB"),
        (VERSION_1, "CPU 2 cores, memory no limit"),
        (CONTAINER, "CPU no limit, memory 1.5 GiB"),
        ({"proc/self/cgroup": "0::/\n"}, "CPU no limit, memory no limit"),
        ({}, "CPU no limit, memory no limit"),  # macOS
    ],
)
def test_limits_of_the_cgroup(monkeypatch, tmp_path, files, says):
    monkeypatch.setattr(doctor, "ROOT", fake_root(tmp_path, files))
    assert result(doctor._limits) == ("ok", "limits", f"{says}, /dev/shm no limit", "")


@pytest.mark.parametrize(("mib", "level"), [(64, "warning"), (4096, "ok")])
def test_size_of_the_shared_memory(monkeypatch, tmp_path, mib, level):
    monkeypatch.setattr(doctor, "ROOT", fake_root(tmp_path, {"dev/shm/file": ""}))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=mib * 2**20))
    shown = result(doctor._limits)
    assert shown.level == level and f"/dev/shm {mib / 1024:.3g} GiB" in shown.text
    assert ("crash when /dev/shm is full" in shown.text) == (level == "warning")
    assert ("--shm-size" in shown.advice) == (level == "warning")


def test_the_nccl_check_uses_all_gpus_and_its_failure_gives_advice(monkeypatch):
    calls = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr(doctor, "_timed", lambda *call: calls.append(call) or "a time")
    assert result(doctor._nccl) == ("ok", "nccl", "a time", "")
    assert calls == [("nccl", 4, ALONE)]
    monkeypatch.setattr(doctor, "_timed", lambda *_: torch.ones(2) @ torch.ones(3))
    failed = result(doctor._nccl)
    assert failed.level == "problem"
    for name in ("/dev/shm", "NCCL_P2P_DISABLE=1", "NCCL_DEBUG=INFO"):
        assert name in failed.advice


def test_gloo_ranks_touch_no_gpu():
    """The ranks believe that this machine has a GPU, and they must not use it."""

    def work():
        def touch(*_):
            raise AssertionError("a gloo rank used CUDA")

        torch.cuda.is_available = lambda: True
        torch.cuda.synchronize = touch
        seconds = doctor._all_reduce("gloo")
        return len(seconds), os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.is_initialized()

    assert run_ranks(work, timeout=timedelta(minutes=2)) == [(2, "", False)] * 2


def test_a_folder_that_cannot_be_written_to_is_a_problem(monkeypatch):
    monkeypatch.chdir(Path("/proc"))
    shown = result(doctor._write)
    assert shown.level == "problem" and shown.advice
