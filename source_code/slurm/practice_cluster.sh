#!/usr/bin/env bash
# A practice cluster: a real Slurm with two nodes of four GPU slots each, on this one Linux machine.
# srun, sbatch, squeue and submitit then work here as they do on a big cluster.
#
#   practice_cluster.sh up   [DIR]                start it, then type:   . DIR/env.sh
#   practice_cluster.sh up   --link RATE [DIR]    with a network between the nodes, of 200mbit, 1gbit, …, or none
#                                                 for one that is not slowed (root only); again, to change its speed
#   practice_cluster.sh down [DIR]                stop it and remove what `up` made
#
# DIR is the repository's .slurm/ unless you say otherwise. Configuration, key, sockets, state and logs all live
# there, and nothing in /etc, /var or /run is read or written (for a network, /etc/hosts is read). It works as root
# and as an ordinary user, whose jobs then run as that user. The GPU slots are counted by Slurm and lead nowhere:
# ranks compute on the CPU.

set -euo pipefail
umask 022
export LC_ALL=C

NODES=(127.0.0.1 127.0.0.2)  # names that resolve on every Linux: ranks meet at the name of the first node
CONTROLLER=127.0.0.1         # where the nodes find their controller
GPUS=4                       # slots a node
CPUS=32                      # and CPUs: promised to Slurm whatever the machine has, so that any job here fits
START_SECONDS=30             # how long a daemon may take before `up` gives up

say() { echo "practice cluster: $*" >&2; }

here=.
if [[ ${BASH_SOURCE[0]} == */* ]]; then here=${BASH_SOURCE[0]%/*}; fi
source "$here/practice_network.sh" # what --link makes

# ---- who is alive ---------------------------------------------------------------------------------------------

# Where process 1 does not reap (a plain container), a dead daemon stays as a zombie, and `kill -0` calls it alive
# for ever. So look at the state, the field after the command's name in parentheses.
is_alive() {
  local stat
  { read -r stat < "/proc/$1/stat"; } 2>/dev/null || return 1
  [[ ${stat##*) } != [ZX]* ]]
}

command_line() { { tr '\0' ' ' < "/proc/$1/cmdline"; } 2>/dev/null || true; }

# Process numbers are used again: one is ours only if its command line names a file of this cluster.
is_ours() { is_alive "$1" && [[ $(command_line "$1") == *"$base/"* ]]; }

# Every recorded daemon passes the given test.
each_daemon() {
  local pid name
  while read -r pid name; do
    "$1" "$pid" || { missing_daemon=$name; return 1; }
  done < "$dir/pids"
}

# ---- what `up` writes -----------------------------------------------------------------------------------------

write_slurm_conf() { # the port of the controller; the nodes take the ports after it
  local host port=$1 node nodes i
  host=$(uname -n) host=${host%%.*}
  printf -v nodes '%s,' "${NODES[@]}"
  nodes=${nodes%,}

  # Keys at their default are left out. An unknown key stops the daemons and every command as well, so all of
  # these are known to Slurm 22.05 and to its successors.
  cat <<CONF
ClusterName=practice
SlurmctldHost=$host($CONTROLLER)
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)

# Jobs that are preempted are held back until their old credential has expired, by default for two minutes.
AuthType=auth/munge
AuthInfo=socket=$base/munge/socket,cred_expire=5

# No cgroups, which need root and systemd: processes are found by their parents.
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
# Take the CPUs and the memory written below for the truth.
SlurmdParameters=config_overrides
ReturnToService=2

# Decide at once. The defaults spare the controller of a cluster with thousands of nodes.
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=1,sched_interval=5

# A job in the partition urgent sends those in gpu back to the queue. They are sent the signal they asked for
# with --signal (else TERM), have GraceTime seconds to save their work, and KillWait more to end.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
KillWait=5

# Remember finished jobs for a day: the stand-in for sacct answers from that memory.
MinJobAge=86400

StateSaveLocation=$base/state
SlurmdSpoolDir=$base/spool/%n
SlurmctldPidFile=$base/slurmctld.pid
SlurmdPidFile=$base/slurmd.%n.pid
SlurmctldLogFile=$base/log/slurmctld.log
SlurmdLogFile=$base/log/slurmd.%n.log
MailProg=/bin/true

CONF
  # What this prints on a node before each task is added to the task's environment.
  if [ -n "$rate" ]; then echo "TaskProlog=$base/bin/task_prolog"; fi
  for i in "${!NODES[@]}"; do
    echo "NodeName=${NODES[i]} NodeHostname=$host NodeAddr=${NODES[i]} Port=$((port + 1 + i))" \
      "CPUs=$CPUS RealMemory=256000 Gres=gpu:$GPUS"
  done
  echo "PartitionName=gpu    Nodes=$nodes Default=YES DefaultTime=60 PriorityTier=1  PreemptMode=REQUEUE GraceTime=10"
  echo "PartitionName=urgent Nodes=$nodes             DefaultTime=60 PriorityTier=10 PreemptMode=OFF"
}

# A GPU must be a device file, or Slurm sets no CUDA_VISIBLE_DEVICES. A link to /dev/null is device enough.
write_gres_conf() {
  local i
  for ((i = 0; i < GPUS; i++)); do ln -s /dev/null "$dir/dev/gpu$i"; done
  for i in "${NODES[@]}"; do echo "NodeName=$i Name=gpu File=$base/dev/gpu[0-$((GPUS - 1))]"; done
}

# slurmd loads a cgroup plugin though nothing here uses one, and the default plugin ends it where there is no
# systemd. From 24.05 on it can be disabled; before, the one for version 1 does nothing until it is used.
write_cgroup_conf() {
  local version major minor
  version=$(slurmd -V) # slurm-wlm 22.05.8
  version=${version##* }
  IFS=. read -r major minor _ <<< "$version"
  case $((10#$major * 100 + 10#$minor)) in
    2[01]??) ;;          # before 22.05 the key is unknown
    22?? | 23??) echo "CgroupPlugin=cgroup/v1" ;;
    *) echo "CgroupPlugin=disabled" ;;
  esac
}

write_env() {
  cat <<ENV
# Source this:  . $dir/env.sh
# Inside another Slurm's job, leftovers such as SLURM_JOB_ID would send srun to look for that job here.
for name in \$(env | sed -n 's/^\(\(SLURM\|SBATCH\|SRUN\|SALLOC\)_[A-Za-z0-9_]*\)=.*/\1/p'); do unset "\$name"; done
unset name
export SLURM_CONF='$base/etc/slurm.conf'
case ":\$PATH:" in *":$base/bin:"*) ;; *) export PATH="$base/bin:\$PATH" ;; esac
# Both nodes are this machine: eight ranks share its cores, and meet on its loopback interface.
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
ENV
  # Not the rate itself, which may change while programs run, but the file that holds it.
  if [ -n "$rate" ]; then echo "export FSDP_LABS_LINK='$base/link'"; else echo "unset FSDP_LABS_LINK"; fi
}

write_sacct() {
  cat <<'SACCT'
#!/usr/bin/env bash
# A stand-in for `sacct -o JobID,State,NodeList --parsable2 [-j ID]...`, which is all that submitit asks for.
# The real one needs an accounting database; this one asks the controller, which remembers a day of jobs.
wanted=,
while [ $# -gt 0 ]; do
  case $1 in
    -j | --jobs) wanted=$wanted$2, && shift ;;
    --jobs=*) wanted=$wanted${1#*=}, ;;
    -j*) wanted=$wanted${1#-j}, ;;
  esac
  shift
done
echo "JobID|State|NodeList"
squeue --noheader --all --states=all --format='%i|%T|%N' |
  awk -F'|' -v wanted="$wanted" '{ split($1, id, "_") } wanted == "," || index(wanted, "," id[1] ",")'
SACCT
}

# The first of three ports in a row (controller and nodes) where nobody listens. Below 12000: from there on the labs
# choose those at which their ranks meet.
free_ports() {
  local port i
  while :; do
    port=$((10000 + RANDOM % 1990))
    for ((i = 0; i <= ${#NODES[@]}; i++)); do
      if (exec 3<> "/dev/tcp/127.0.0.1/$((port + i))") 2>/dev/null; then continue 2; fi
    done
    echo "$port"
    return
  done
}

# ---- up -------------------------------------------------------------------------------------------------------

start() { # name, command…: in a session of its own, so that Ctrl-C in your terminal does not reach it
  local name=$1
  shift
  setsid "$@" < /dev/null > "$dir/log/$name.out" 2>&1 &
  echo "$! $name" >> "$dir/pids"
}

wait_until() { # command…
  local deadline=$((SECONDS + START_SECONDS))
  until "$@"; do
    each_daemon is_alive || { say "$missing_daemon ended at once."; return 1; }
    ((SECONDS < deadline)) || { say "no $1 within $START_SECONDS seconds."; return 1; }
    sleep 0.05
  done
}
munge_socket() { [ -S "$base/munge/socket" ]; }
controller() { timeout 5 scontrol ping 2>/dev/null | grep -q "is UP"; }
idle_nodes() { [ "$(timeout 5 sinfo -h -N -p gpu -t idle -o %N 2>/dev/null | wc -l)" -eq ${#NODES[@]} ]; }

# Whatever goes wrong while starting: show why, and leave nothing behind.
give_up() {
  trap - EXIT INT TERM
  say "it did not come up. From its logs:"
  # (without what every start says: that there is no state to take up yet, and no MPI)
  grep -hiE 'error|fatal|failed' "$dir"/log/*.out 2>/dev/null |
    grep -vE 'state file|NOTE:|mpi|MPI' | tail -n 15 >&2 || true
  tear_down
  exit 1
}

up() { # dir, rate (empty: without a network)
  local command missing="" port i rate=$2

  export PATH=${PATH:+$PATH:}/usr/sbin:/sbin # where the daemons are, though not on everybody's PATH
  for command in munged slurmctld slurmd scontrol sinfo squeue srun sbatch; do
    [ -n "$(type -P $command)" ] || missing="$missing, no $command"
  done
  if [ -n "$missing" ]; then
    say "Slurm is not complete here (${missing#, }), so first type:" \
      "sudo apt-get install --no-install-recommends slurm-wlm munge"
    exit 2
  fi

  find_dir "$1"
  if [ -e "$dir/env.sh" ] && each_daemon is_ours; then
    if [ -n "$rate" ]; then change_link "$rate"; fi
    say "already up. In each terminal that is to use it:  . $(typed "$dir/env.sh")"
    exit 0
  fi
  if [ -n "$rate" ]; then check_network "$rate"; fi
  if [ -e "$dir/pids" ]; then
    say "clearing away one that was not taken down."
    tear_down
  fi
  # `down` will remove what stands here: never take over a folder with something in it.
  if [ -n "$(ls -A "$dir" 2>/dev/null)" ]; then
    say "$dir is not empty: name a folder that is, or a new one."
    exit 1
  fi

  mkdir -p "$dir"/{bin,dev,etc,log,munge,spool,state}
  : > "$dir/pids"
  trap give_up EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  # A socket's path holds at most 107 bytes, of which Slurm adds some 45 to DIR, and a configuration takes no
  # blanks. Where DIR is too long or has such characters, the cluster reaches it by a short name, a link.
  if ((${#dir} > 60)) || [[ $dir == *[!a-zA-Z0-9/._-]* ]]; then
    base=$(mktemp -d /tmp/practice-cluster.XXXXXX)
    chmod 755 "$base"
    base=$base/dir
    echo "$base" > "$dir/base"
    ln -s "$dir" "$base"
    export SLURM_CONF=$base/etc/slurm.conf
  fi
  if [ -n "$rate" ]; then make_network "$rate"; fi
  for i in "${NODES[@]}"; do mkdir "$dir/spool/$i"; done

  port=$(free_ports)
  write_slurm_conf "$port" > "$dir/etc/slurm.conf"
  write_gres_conf > "$dir/etc/gres.conf"
  write_cgroup_conf > "$dir/etc/cgroup.conf"
  write_sacct > "$dir/bin/sacct"
  chmod +x "$dir/bin/sacct"
  (umask 077 && head -c 1024 /dev/urandom > "$dir/munge/key")

  start munged munged --foreground --force --socket="$base/munge/socket" --key-file="$base/munge/key" \
    --seed-file="$base/munge/seed" --pid-file="$base/munge/pid" --log-file="$base/log/munged.log"
  wait_until munge_socket
  start slurmctld slurmctld -D -f "$SLURM_CONF"
  wait_until controller # a slurmd that finds no controller waits a whole second before it tries again
  for i in 1 2; do start "slurmd.$i" ${rate:+$(entrance $i)} slurmd -D -N "${NODES[i - 1]}" -f "$SLURM_CONF"; done
  wait_until idle_nodes
  write_env > "$dir/env.sh" # the last thing made: where it stands, all stands
  trap - EXIT INT TERM

  say "two nodes with $GPUS GPU slots each are up. In each terminal that is to use them:"
  cat <<USE
  . $(typed "$dir/env.sh")
  cd $(typed "$home/source_code")
  srun -p gpu -N 1 --gres=gpu:$GPUS python mnist_fsdp.py
And when you are done:  bash $(typed "$home/source_code/slurm/practice_cluster.sh") down${given:+ $(typed "$dir")}
USE
}

# A path as you would type it from here.
typed() { printf '%q' "${1#"$PWD/"}"; }

# ---- down -----------------------------------------------------------------------------------------------------

down() {
  find_dir "$1"
  if [ ! -e "$dir/pids" ]; then
    say "nothing is up in $dir."
    exit 0
  fi
  tear_down
  say "down."
}

tear_down() {
  local pid name i

  # Jobs first: slurmd does not end them when it stops, and they would run on without it. They have two seconds.
  if controller; then
    timeout 10 scancel --user="$(id -un)" 2>/dev/null || true
    for i in {1..20}; do
      [ -n "$(timeout 5 squeue -h -t running,completing,suspended,stopped -o %i 2>/dev/null)" ] || break
      sleep 0.1
    done
  fi
  kill_jobs

  # Then the daemons, the last started first: nodes, controller, munge, and what holds the nodes' networks.
  while read -r pid name; do
    is_ours "$pid" || continue
    kill -TERM "$pid" 2>/dev/null || true
    for i in {1..100}; do
      is_alive "$pid" || continue 2
      sleep 0.05
    done
    say "$name did not stop when asked, so it is killed."
    kill -KILL "$pid" 2>/dev/null || true
  done < <(tac "$dir/pids")
  kill_jobs
  remove_network

  rm -rf "${dir:?}"/{bin,dev,etc,log,munge,spool,state,env.sh,link} "$dir"/*.pid
  if [ "$base" != "$dir" ]; then
    rm -f "$base"
    rmdir "${base%/*}" 2>/dev/null || true
  fi
  rm -f "$dir/base" "$dir/pids"
  rmdir "$dir" 2>/dev/null || say "$dir holds files that are not the cluster's: they are left."
}

# What is left of jobs: ranks that catch TERM or whose parent died, and the step daemons that look after them.
# Everything of the cluster carries its SLURM_CONF, and so does your own shell; only a job has a SLURM_PROCID.
kill_jobs() {
  local pid left i
  for i in {1..40}; do
    left=0
    for pid in $(grep -lszxF "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ | tr -dc '0-9\n'); do
      if [ "$pid" = $$ ]; then continue; fi
      if [[ $(command_line "$pid") == slurmstepd* ]] || grep -qsz '^SLURM_PROCID=' "/proc/$pid/environ"; then
        kill -KILL "$pid" 2>/dev/null || true
        left=1
      fi
    done
    ((left)) || break
    sleep 0.05
  done
}

# ---- which cluster --------------------------------------------------------------------------------------------

# Sets: home (the repository), dir (the cluster's folder), base (dir, or the short name that stands for it).
find_dir() {
  home=$(cd "$here/../.." && pwd)
  given=$1
  dir=$(realpath -m "${given:-$home/.slurm}")
  base=$dir
  if [ -e "$dir/base" ]; then read -r base < "$dir/base"; fi
  # What this shell inherits from another Slurm must not leak into this one's daemons.
  unset "${!SLURM_@}" "${!SBATCH_@}" "${!SRUN_@}"
  export SLURM_CONF=$base/etc/slurm.conf
}

case "${1:-} ${2:-}" in
  "up --link")
    check_rate "${3:-}"
    up "${4:-}" "$3"
    ;;
  "up "* | "down "*) "$1" "${2:-}" "" ;;
  *)
    echo "usage: practice_cluster.sh up [--link RATE] [DIR], or practice_cluster.sh down [DIR]" >&2
    exit 2
    ;;
esac
