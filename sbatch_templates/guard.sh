#!/bin/sh
# Requeues a job when the node of its batch script is taken from it, which Slurm does not do with --no-kill.
# Arguments: job, node of the batch script, seconds between two looks, log.
while sleep "$3"; do
  # A site may print lines of its own before or after the answer.
  job=$(squeue --noheader --jobs="$1" --format="%T %N" 2>/dev/null | grep -E "^(PENDING|RUNNING)") || continue
  # While a job is made smaller, Slurm may show another state, or none, for a moment.
  case $job in PENDING*) exit 0 ;; "RUNNING "?*) ;; *) continue ;; esac
  left=$(scontrol show hostnames "${job#RUNNING }") || continue
  if ! echo "$left" | grep -qxF "$2"; then
    echo "slurm_train: $2, where the supervisor ran, was taken from job $1, which is requeued" >> "$4"
    scontrol requeue "$1" 2>> "$4" || scancel "$1"
    exit
  fi
done
