# Sourced by the job templates. `run_and_requeue COMMAND …` runs the job's step; if it ends before its training is done,
# the job goes back to the queue and resumes from its newest checkpoint:
#
#   it was asked to end (time limit, preemption), and has saved       back to the queue
#   it failed or was killed, after it had saved a new checkpoint      back to the queue
#   it ended in any other way                                         back, MAX_RESTARTS times in a row at most
#   a user's error (exit code 2), a loss that is not finite (65)      it ends: it would end the same way again
#
# It also ends without --resume, and if it failed before its first checkpoint. What happened is read from a file that the
# ranks write (labkit/running/job_status.py): exit codes depend on which rank ends first.
MAX_RESTARTS=${MAX_RESTARTS:-3}
EXCLUDE_FAILED_NODE=${EXCLUDE_FAILED_NODE:-}  # 1: resume without the node on which a rank failed first

run_and_requeue() {
  export FSDP_LABS_STATUS="${SLURM_SUBMIT_DIR:-$PWD}/.status-$SLURM_JOB_ID"
  echo "start ${SLURM_RESTART_COUNT:-0}" >>"$FSDP_LABS_STATUS"
  local code=0 idle ever how node
  "$@" || code=$?
  # idle: starts in a row, up to this one, that saved nothing. ever: whether any has saved. how, node: of this one.
  read -r idle ever how node < <(awk '
    $1 == "start" { idle = saved ? 0 : idle + (NR > 1); saved = 0; how = node = "-" }
    $1 == "saved" || $1 == "asked" { saved = ever = 1 }
    $1 == "asked" || $1 == "refused" || $1 == "diverged" { how = $1 }
    $1 == "failed" && node == "-" { node = $2 }
    END { print saved ? 0 : idle + 1, ever + 0, how, node }' "$FSDP_LABS_STATUS")
  if [ "$code" = 0 ] || [[ " $* " != *" --resume "* ]] || [ "$how" = refused ] || [ "$how" = diverged ]; then
    rm -f "$FSDP_LABS_STATUS"
  elif [ "$idle" -gt "$MAX_RESTARTS" ]; then
    echo "Not requeued: the last $idle starts saved nothing. Look at what they printed, then submit the job again." >&2
  elif [ "$ever" = 0 ] && [ "$code" != 138 ] && [ "$code" != 140 ]; then  # 138, 140: warned before it could listen
    echo "Not requeued: it ended before its first checkpoint." >&2
  else
    trap '' TERM  # which Slurm sends this script when the job goes back: there is one thing left to do
    scontrol requeue "$SLURM_JOB_ID"
    if [ -n "$EXCLUDE_FAILED_NODE" ] && [ "$node" != - ]; then  # possible only now that the job waits in the queue
      scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$(_excluded "$node")"
    fi
  fi
  exit "$code"
}

_excluded() {  # the nodes that are excluded already, and one more
  local now
  now=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*ExcNodeList=\([^ ]*\).*/\1/p')
  if [ -z "$now" ] || [ "$now" = "(null)" ]; then echo "$1"; else echo "$now,$1"; fi
}
