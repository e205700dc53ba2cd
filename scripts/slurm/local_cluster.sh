#!/usr/bin/env bash
# A Slurm cluster on one machine: two hosts, node1 and node2, each with two pretend GPUs.
#
#   sudo scripts/slurm/local_cluster.sh up        start it and say how to use it
#   sudo scripts/slurm/local_cluster.sh down      end its jobs and leave nothing behind
#   scripts/slurm/local_cluster.sh status         show its hosts; exit code 1 if it is not up
#   sudo scripts/slurm/local_cluster.sh on node1 COMMAND...   run a command there, as ssh would
#
# It runs the real slurmctld, slurmd and munged from Debian: sudo apt-get install slurm-wlm munge
# A host is a network namespace with its own address and name. The hosts share the machine's files,
# users and cores, so all of them see the same home directory, as on a cluster. The GPUs exist only
# in Slurm's configuration. You need no systemd and no cgroups. A Slurm that is already installed is
# not touched: this cluster has its own network, ports, key and configuration.
#
# LOCAL_CLUSTER is the cluster's name (default: ddp), and LOCAL_CLUSTER_NET is its network (default:
# 10.213.7). To start a second cluster, set both, after sudo.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin"
umask 022  # munged refuses a folder that users cannot enter
unset "${!SLURM_@}" "${!SINFO_@}" "${!SCANCEL_@}"  # of another cluster, or a narrower question

NAME=${LOCAL_CLUSTER:-ddp}  # also of the interface by which the machine reaches it
NET=${LOCAL_CLUSTER_NET:-10.213.7}
STATE=/run/local-cluster-$NAME  # the folder that holds all there is
HOSTS=(controller node1 node2)

main() {
    [[ $NAME =~ ^[a-z][a-z0-9-]{0,14}$ ]] ||
        fail "LOCAL_CLUSTER must be 1 to 15 of a-z, 0-9 and -, not '$NAME'"
    [[ $NET =~ ^[0-9]+\.[0-9]+\.[0-9]+$ && $NET != 127.* ]] ||
        fail "LOCAL_CLUSTER_NET must be three numbers, such as 10.213.8, not '$NET'"
    case "${1:-}" in
        up) up ;;
        down) check_root && lock && down ;;
        status) status ;;
        on) [ $# -ge 3 ] || usage; check_root && on "${@:2}" ;;
        *) usage ;;
    esac
}

fail() {
    echo "error: $1" >&2
    exit 1
}

usage() {
    fail "local_cluster.sh needs one of: up, down, status, on HOST COMMAND..."
}

check_root() {
    [ "$(id -u)" = 0 ] || fail "namespaces need root: put sudo before the command"
}

check_packages() {
    local missing=()
    for command in slurmctld slurmd munged srun ip nsenter unshare flock; do
        command -v "$command" > /dev/null || missing+=("$command")
    done
    [ ${#missing[@]} = 0 ] ||
        fail "no ${missing[*]} here: sudo apt-get install slurm-wlm munge iproute2 util-linux"
}

check_network() {
    [ -z "$(ip route show root "$NET.0/24")" ] ||
        fail "$NET.0/24 is in use here: set LOCAL_CLUSTER_NET to another, such as 10.213.8"
    ! ip link show dev "$NAME" > /dev/null 2>&1 ||
        fail "there is an interface $NAME here: set LOCAL_CLUSTER to another name"
}

lock() {  # one up or down at a time
    exec 9< "${STATE%/*}"
    flock 9
}

up() {
    if ! is_up; then
        check_root
        check_packages
        lock
    fi
    if is_up; then  # another "up" may have started it meanwhile
        echo "$NAME is already up"
    else
        start
    fi
    echo "use it:   export SLURM_CONF=$STATE/slurm.conf"
    echo "then:     srun --nodes=2 --ntasks=2 --kill-on-bad-exit=1 hostname"
}

is_up() {
    local host
    for host in "${HOSTS[@]}"; do  # Slurm itself takes a while to miss a daemon
        is_alive "$(cat "$STATE/$host/pid" 2> /dev/null)" || return 1
    done
    status > /dev/null 2>&1
}

is_alive() {
    [ -n "$1" ] && grep --quiet "^State:.[^Z]" "/proc/$1/status" 2> /dev/null
}

start() {
    down > /dev/null  # what a crash left of it
    check_network
    trap "trap '' INT TERM HUP; explain; down > /dev/null" EXIT
    mkdir "$STATE"
    # On most machines nothing in /run may be run, but that is where slurmd puts job scripts.
    mount -t tmpfs -o mode=755 "local-cluster-$NAME" "$STATE"
    mkdir "$STATE/net"
    make_network
    write_config
    start_daemons
    wait_until_up
    trap - EXIT
}

explain() {  # show the daemons' logs if the cluster does not come up
    tail --lines=5 "$STATE"/*/log >&2 2> /dev/null || true
}

make_network() {
    # A file in $STATE keeps each namespace alive. `ip netns` would leave a mount behind and hide
    # the cgroup mount, without which slurmd exits. The bridge is in the controller's namespace, so
    # that the machine's firewall does not filter the traffic between the hosts.
    local host number=1
    for host in "${HOSTS[@]}"; do
        touch "$STATE/net/$host"
        unshare --net="$STATE/net/$host" ip link set lo up
    done
    enter controller ip link add bridge0 type bridge
    enter controller ip link set bridge0 up
    ip link add "$NAME" type veth peer name machine netns "$STATE/net/controller"
    touch "$STATE/interface"  # it is ours to delete
    plug machine
    ip address add "$NET.1/24" dev "$NAME"
    ip link set "$NAME" up
    for host in "${HOSTS[@]}"; do
        number=$((number + 1))
        enter "$host" ip link add eth0 type veth peer name "$host" netns "$STATE/net/controller"
        plug "$host"
        enter "$host" ip address add "$NET.$number/24" dev eth0
        enter "$host" ip link set eth0 up
        echo "$NET.$number $host" >> "$STATE/hosts"
        echo "::ffff:$NET.$number $host" >> "$STATE/hosts"  # for torch, which asks for names so
    done
    printf "%s localhost\n" 127.0.0.1 ::ffff:127.0.0.1 >> "$STATE/hosts"
}

plug() {
    enter controller ip link set "$1" master bridge0 up
}

enter() {
    nsenter --net="$STATE/net/$1" "${@:2}"
}

write_config() {
    local host
    mkdir "${HOSTS[@]/#/$STATE/}" "$STATE/controller/jobs"
    for gpu in 0 1; do  # /dev/null by another name
        mknod --mode=666 "$STATE/gpu$gpu" c 1 3
    done
    (umask 077 && head --bytes=1024 /dev/urandom > "$STATE/munge.key")
    cat > "$STATE/gres.conf" << END
Name=gpu File=$STATE/gpu[0-1]
END
    # A task sees no GPU that it did not ask for, as with cgroups: the hosts are one machine.
    printf '%s\n' '#!/bin/sh' 'echo "export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:--1}"' \
        > "$STATE/task_prolog.sh"
    chmod +x "$STATE/task_prolog.sh"
    cat > "$STATE/slurm.conf" << END
ClusterName=$NAME
SlurmctldHost=controller($NET.2)
NodeName=node1 NodeAddr=$NET.3 CPUs=8 RealMemory=65536 Gres=gpu:2
NodeName=node2 NodeAddr=$NET.4 CPUs=8 RealMemory=65536 Gres=gpu:2
PartitionName=local Nodes=ALL Default=YES State=UP
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
# The hosts are what this file says, not what slurmd finds on the machine.
SlurmdParameters=config_overrides
AuthInfo=socket=$STATE/munge.socket
SlurmUser=root
# Without systemd and cgroups:
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog=$STATE/task_prolog.sh
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
# salloc opens its shell on the first host of the allocation, as most clusters do.
LaunchParameters=use_interactive_step
# Seconds between two scheduling passes: the queue is short, so they can be frequent.
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
# If a host does not answer for 30 s, it is down and its jobs are requeued. It may rejoin by itself.
SlurmdTimeout=30
ReturnToService=2
# Seconds between SIGTERM and SIGKILL, and for which scontrol shows a job that has ended.
KillWait=30
MinJobAge=3600
StateSaveLocation=$STATE/controller/jobs
SlurmctldPidFile=$STATE/controller/pid
SlurmctldLogFile=$STATE/controller/log
SlurmdSpoolDir=$STATE/%n/spool
SlurmdPidFile=$STATE/%n/pid
SlurmdLogFile=$STATE/%n/log
END
}

start_daemons() {
    on controller munged --key-file="$STATE/munge.key" --socket="$STATE/munge.socket" \
        --pid-file="$STATE/munge.pid" --seed-file="$STATE/munge.seed" \
        --log-file="$STATE/controller/munge.log" 9<&-
    on controller slurmctld -f "$STATE/slurm.conf" 9<&-
    on node1 slurmd -f "$STATE/slurm.conf" 9<&-
    on node2 slurmd -f "$STATE/slurm.conf" 9<&-
}

on() {
    [ -e "$STATE/net/$1" ] || fail "$NAME has no host $1, or is not up"
    # shellcheck disable=SC2016  # expanded there
    SLURM_CONF=$STATE/slurm.conf enter "$1" unshare --uts --mount bash -c '
        hostname "$1"
        mount --bind "$2" /etc/hosts
        exec "${@:3}"' on "$1" "$STATE/hosts" "${@:2}"
}

wait_until_up() {
    local deadline=$((SECONDS + 30))
    until is_up; do
        [ $SECONDS -lt $deadline ] || fail "the hosts of $NAME did not come up within 30 s"
        sleep 0.1
    done
}

status() {
    if ! [ -e "$STATE/slurm.conf" ]; then
        echo "$NAME is not up"
        return 1
    fi
    export SLURM_CONF=$STATE/slurm.conf
    if ! timeout 5 sinfo --Node --long; then
        echo "$NAME does not answer"
        return 1
    fi
    [ "$(timeout 5 sinfo --noheader --Node --responding --states=idle,mix,alloc,comp | wc -l)" = 2 ]
}

down() {
    local file
    if [ -e "$STATE/controller/pid" ]; then
        SLURM_CONF=$STATE/slurm.conf timeout 5 scancel --user=root || true
    fi
    end_all TERM 5
    end_all KILL 5
    if [ -e "$STATE/interface" ]; then
        ip link delete "$NAME" || true
    fi
    for file in "$STATE"/net/*; do
        umount "$file" 2> /dev/null || true  # one that never became a namespace
    done
    umount "$STATE" 2> /dev/null || umount --lazy "$STATE" 2> /dev/null || true
    rm -rf "$STATE"
    echo "$NAME is down; if you exported SLURM_CONF, run: unset SLURM_CONF"
}

end_all() {  # send a signal to all processes, again and again for some seconds
    local deadline=$((SECONDS + $2)) pids
    while pids=$(processes) && [ -n "$pids" ] && [ $SECONDS -lt $deadline ]; do
        # shellcheck disable=SC2086  # one word a process
        kill -s "$1" $pids 2> /dev/null || true
        sleep 0.2
    done
}

processes() {  # everything on the hosts, and the clients (srun, ...) that wait on the machine
    local host
    for host in "${HOSTS[@]}"; do
        find -L /proc/[0-9]*/ns/net -maxdepth 0 -samefile "$STATE/net/$host" 2> /dev/null || true
    done | cut --delimiter=/ --fields=3
    grep --files-with-matches --null-data --line-regexp "SLURM_CONF=$STATE/slurm.conf" \
        /proc/[0-9]*/environ 2> /dev/null | cut --delimiter=/ --fields=3 | while read -r process; do
        if grep --quiet --null-data "^SLURM_JOB_ID=" "/proc/$process/environ" ||
            grep --quiet --line-regexp -E "srun|salloc|sbatch|sattach" "/proc/$process/comm"; then
            [ "$process" = $$ ] || echo "$process"  # `down` may have been typed in a job
        fi
    done 2> /dev/null || true
}

main "$@"
