"""scripts/doctor.py says what is wrong and what to do, and then exits with 1."""

import json
import socket
import sys
from dataclasses import replace

from harness import SCRIPTS, run

from ddp_ref.launch import LaunchInfo

sys.path.append(str(SCRIPTS))
import doctor

COMMAND = (sys.executable, SCRIPTS / "doctor.py")
CHECKS = ["platform", "launch", "backends", "devices", "shm", "addresses", "gloo", "nccl"]
ALONE = LaunchInfo(launcher="none", reason="a test")
TWO_NODES = replace(ALONE, world_size=2, master_addr="10.0.0.1", master_port=29999)


def result(check, launch=ALONE):
    """Return what the report says about one check."""
    return doctor._run_check(check, launch)


def test_a_line_per_check_and_a_summary(tmp_path):
    ended = run(*COMMAND, cwd=tmp_path)
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


def test_a_problem_leads_to_exit_code_1(tmp_path):
    """Some of torchrun's variables are missing, and gloo does not understand NCCL's `^lo`."""
    environment = {"RANK": "0", "GLOO_SOCKET_IFNAME": "^lo"}
    ended = run(*COMMAND, "--json", cwd=tmp_path, env=environment)
    assert ended.code == 1
    report = {finding["check"]: finding for finding in json.loads(ended.stdout)}
    assert [*report] == CHECKS
    for check, says in [("launch", "WORLD_SIZE not set"), ("gloo", "^lo")]:
        assert report[check]["level"] == "problem"
        assert says in report[check]["text"]
        assert report[check]["advice"]
    assert report["nccl"]["level"] == "ok"  # the problems do not hide other results
    assert "starting 2 gloo ranks" in ended.stderr


def test_two_nodes_need_more_than_a_loopback_address(monkeypatch):
    """Debian's /etc/hosts maps a host's own name to 127.0.1.1, which gloo would use."""
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    level, _, text, advice = result(doctor._addresses, TWO_NODES)
    assert level == "problem" and "127.0.1.1, a loopback address" in text
    assert "GLOO_SOCKET_IFNAME" in advice
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert result(doctor._addresses, TWO_NODES).level == "ok"
    master = replace(TWO_NODES, master_addr="::1")
    assert result(doctor._addresses, master).level == "problem"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert result(doctor._addresses, master).level == "ok"


def test_slurm_job_without_a_step_is_a_warning(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    level, _, text, advice = result(doctor._launch)
    assert level == "warning" and text.startswith("SLURM_NTASKS=4, but srun did not start")
    assert "srun" in advice


def test_too_few_gpus_are_a_problem_unless_the_ranks_share_them(monkeypatch):
    monkeypatch.delenv("DDP_SHARE_GPUS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "H100")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    launch = replace(ALONE, launcher="torchrun", world_size=2)
    shown = result(doctor._devices, launch)
    assert shown.level == "problem" and "1 visible GPU for 2 local ranks (H100)" in shown.text
    assert 'backend="gloo"' in shown.advice and "share_gpus=True" in shown.advice
    monkeypatch.setenv("DDP_SHARE_GPUS", "1")
    shared = result(doctor._devices, launch)
    assert shared.level == "ok" and "ranks share a GPU" in shared.text
    monkeypatch.delenv("DDP_SHARE_GPUS")
    slurm = replace(launch, launcher="slurm")  # --gpus-per-task=1: a task sees only its own GPU
    assert result(doctor._devices, slurm).level == "ok"
