#!/bin/bash
# {title}
# Element N is the run in line N + 1 of runs.txt. Works by hand as well: `sbatch submit.sh` (finished runs end at once).
{sbatch}

set -e
mapfile -t -s "{index}" -n 1 run < {runs}
script="${{run:?there is no such line in runs.txt}}/submit.sh"
# It is run before the run itself can look whether somebody else may write what it runs.
if [ -n "$(find {runs} "$run" "$script" -maxdepth 0 \( ! -uid "$EUID" ! -uid 0 -o -perm /022 \) 2>&1)" ]; then
  echo "error: $script is missing, or somebody else owns it or may write it; see: ls -ld $run $script" >&2
  exit 2
fi
exec bash "$script" >> "$run/logs/batch.log" 2>&1
