#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A Slurm of one node on this machine, to try the templates and for tests; as root, without systemd.
#   scripts/slurm/local.sh start|stop|status DIR
# Everything lives in DIR. Then: export SLURM_CONF=DIR/slurm.conf
# Debian: apt-get install --no-install-recommends slurm-wlm munge
set -euo pipefail
(($# == 2)) || { sed -n '3,7s/^# //p' "$0" >&2; exit 2; }
mkdir -p -- "$2"
dir=$(cd -- "$2" && pwd -P)
host=$(hostname -s)
cpus=${LONGSCAN_SLURM_CPUS:-4}  # may be more than there are
export SLURM_CONF=$dir/slurm.conf
socket=$dir/munge/socket

# Two ports that are free, below those that the system gives out by itself: until they are used nobody is given them.
free_ports() {
  python3 -c '
import random, socket
with open("/proc/sys/net/ipv4/ip_local_port_range") as f:
    first = int(f.read().split()[0])
low, high = (max(1024, first - 16384), first) if first > 4096 else (1024, 65536)
held = []
for port in random.sample(range(low, high), high - low):
    held.append(socket.socket())
    try:
        held[-1].bind(("", port))
    except OSError:
        held.pop().close()
    if len(held) == 2:
        break
print(*(s.getsockname()[1] for s in held))'
}

configure() {
  local controller daemon
  mkdir -p "$dir"/{munge,state,spool,log}
  chmod 711 "$dir" "$dir/munge"
  read -r controller daemon < <(free_ports)
  (umask 077 && head -c 128 /dev/urandom > "$dir/munge/key")
  cat > "$SLURM_CONF" << CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=$controller
SlurmdPort=$daemon
AuthType=auth/munge
AuthInfo=socket=$socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.log
# no cgroups, as there may be no systemd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0
MpiDefault=none
ReturnToService=2
KillWait=600
# a machine that has much to do is no reason to give up
MessageTimeout=100
TCPTimeout=60
SlurmdTimeout=0
UnkillableStepTimeout=1200
MinJobAge=3600
OverTimeLimit=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MailProg=/bin/true
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus Boards=1 SocketsPerBoard=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=1024 State=UNKNOWN
PartitionName=normal Nodes=$host Default=YES MaxTime=01:00:00 PriorityTier=1 PreemptMode=OFF
PartitionName=low Nodes=$host MaxTime=01:00:00 PriorityTier=1 PreemptMode=REQUEUE GraceTime=600
PartitionName=high Nodes=$host MaxTime=01:00:00 PriorityTier=10 PreemptMode=OFF
CONF
}

# until_true COMMAND…: at most five minutes
until_true() {
  for _ in {1..1500}; do
    if "$@" > /dev/null 2>&1; then return 0; fi
    sleep 0.2
  done
  echo "waited in vain for: $*" >&2
  tail -n 5 "$dir"/log/* "$dir"/munge/log >&2
  return 1
}
node_is_idle() { [[ $(sinfo -h -o %T) == idle ]]; }

# run NAME COMMAND…: in the background, its process number on record
run() {
  local name=$1
  shift
  "$@" > "$dir/log/$name.out" 2>&1 < /dev/null &
  echo "$name $!" >> "$dir/pids"
}

case $1 in
  start)
    configure
    : > "$dir/pids"
    run munged munged --foreground --force --key-file="$dir/munge/key" --socket="$socket" \
      --pid-file="$dir/munge/pid" --seed-file="$dir/munge/seed" --log-file="$dir/munge/log"
    until_true munge -n -S "$socket"
    run slurmctld slurmctld -D -c -f "$SLURM_CONF"
    until_true scontrol ping
    run slurmd slurmd -D -N "$host" -f "$SLURM_CONF"
    until_true node_is_idle
    echo "export SLURM_CONF=$SLURM_CONF"
    ;;
  stop)
    [[ -e $dir/pids ]] || exit 0
    timeout 10 scancel --quiet --full -u root || true
    tac "$dir/pids" | while read -r name pid; do
      [[ $(cat "/proc/$pid/comm" 2> /dev/null) == "$name" ]] || continue  # only what `start` started
      kill "$pid"
      for _ in {1..50}; do
        [[ -d /proc/$pid ]] || break
        sleep 0.2
      done
      if [[ -d /proc/$pid ]]; then kill -KILL "$pid"; fi
    done
    rm -f "$dir/pids"
    ;;
  status)
    cat "$dir/pids"
    sinfo
    squeue
    ;;
  *)
    echo "start, stop or status, not $1" >&2
    exit 2
    ;;
esac
