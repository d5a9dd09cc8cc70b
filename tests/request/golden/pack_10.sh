#!/bin/bash
# sweep-9b1c44e0-0: 10 runs, 4 in a job
# Element N carries 4 lines of runs.txt out side by side, from line N * 4 + 1 on, each by the run's own submit.sh.
# Works by hand as well: `sbatch submit.sh` (finished runs end at once).
#SBATCH --job-name=sweep-9b1c44e0-0
#SBATCH --array=0-2%2
#SBATCH --output='/home/user/it'"'"'s mine/runs/sweeps/9b1c44e0/arrays/000/logs/%a.log'
#SBATCH --nodes=1
#SBATCH --ntasks=8
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:a100:8
#SBATCH --mem=128G
#SBATCH --open-mode=append
#SBATCH --chdir=/home/user/project
#SBATCH --requeue
#SBATCH --signal=USR2@120

pack=4
mapfile -t -s "$((${SLURM_ARRAY_TASK_ID:?this script is for sbatch} * pack))" -n "$pack" runs < '/home/user/it'"'"'s mine/runs/sweeps/9b1c44e0/arrays/000/runs.txt'
# Signals are for the ranks. They are ignored here, since a handler would make `wait` return early.
trap '' TERM USR1 USR2
# Arguments: run, what its supervisor is to know.
call() {
  # It is run before the run itself can look whether somebody else may write what it runs.
  if [ -n "$(find '/home/user/it'"'"'s mine/runs/sweeps/9b1c44e0/arrays/000/runs.txt' "$1" "$1/submit.sh" -maxdepth 0 \( ! -uid "$EUID" ! -uid 0 -o -perm /022 \) 2>&1)" ]; then
    echo "error: $1/submit.sh is missing, or somebody else owns it or may write it; see: ls -ld $1 $1/submit.sh" >&2
    return 2
  fi
  SLURM_TRAIN_PACK=$2 bash "$1/submit.sh" >> "$1/logs/batch.log" 2>&1
}
pids=()
for slot in "${!runs[@]}"; do
  call "${runs[slot]}" "$slot/$pack" &
  pids+=($!)
done
[ "${#pids[@]}" -gt 0 ] || { echo "error: there is no such line in runs.txt" >&2; exit 2; }
code=0
back=()
for slot in "${!runs[@]}"; do
  wait "${pids[slot]}"
  ended=$?
  if [ "$ended" -eq 75 ]; then back+=("${runs[slot]}"); elif [ "$ended" -ne 0 ]; then code=$ended; fi
done
# All have ended. The first requeues the job for all of them, and Slurm ends this script by it.
for run in "${back[@]}"; do
  call "$run" back
  code=$?
done
exit "$code"
