#!/bin/bash
# {title}
# Element N carries {pack} lines of runs.txt out side by side, from line N * {pack} + 1 on, each by the run's own submit.sh.
# Works by hand as well: `sbatch submit.sh` (finished runs end at once).
{sbatch}

pack={pack}
mapfile -t -s "$(({index} * pack))" -n "$pack" runs < {runs}
# Signals are for the ranks. They are ignored here, since a handler would make `wait` return early.
trap '' TERM USR1 USR2
# Arguments: run, what its supervisor is to know.
call() {{
  # It is run before the run itself can look whether somebody else may write what it runs.
  if [ -n "$(find {runs} "$1" "$1/submit.sh" -maxdepth 0 \( ! -uid "$EUID" ! -uid 0 -o -perm /022 \) 2>&1)" ]; then
    echo "error: $1/submit.sh is missing, or somebody else owns it or may write it; see: ls -ld $1 $1/submit.sh" >&2
    return 2
  fi
  SLURM_TRAIN_PACK=$2 bash "$1/submit.sh" >> "$1/logs/batch.log" 2>&1
}}
pids=()
for slot in "${{!runs[@]}}"; do
  call "${{runs[slot]}}" "$slot/$pack{gpus}" &
  pids+=($!)
done
[ "${{#pids[@]}}" -gt 0 ] || {{ echo "error: there is no such line in runs.txt" >&2; exit 2; }}
code=0
back=()
for slot in "${{!runs[@]}}"; do
  wait "${{pids[slot]}}"
  ended=$?
  if [ "$ended" -eq {requeue} ]; then back+=("${{runs[slot]}}"); elif [ "$ended" -ne 0 ]; then code=$ended; fi
done
# All have ended. The first requeues the job for all of them, and Slurm ends this script by it.
for run in "${{back[@]}}"; do
  call "$run" back
  code=$?
done
exit "$code"
