#!/bin/bash
# gpt-stdlib/c62a1f226dab: global batch 48 = 6 local x 8 ranks x 1 accumulation
# Works by hand as well: `sbatch submit.sh`, or `bash submit.sh` inside an salloc.
#SBATCH --job-name=gpt-stdlib-c62a1f226dab
#SBATCH --nodes=2-4
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --output=/home/user/project/runs/gpt-stdlib/c62a1f226dab/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --chdir=/home/user/project
#SBATCH --requeue
#SBATCH --signal=USR2@120

set -e
export PYTHONUNBUFFERED=1

cd /
exec /usr/bin/python3 -m slurm_train supervise /home/user/project/runs/gpt-stdlib/c62a1f226dab -- \
  srun --nodes='{nodes}' --ntasks='{tasks}' --ntasks-per-node=1 --distribution=block --job-name='attempt_{attempt}' --kill-on-bad-exit=1 --wait=60 --open-mode=append --export=ALL --output='/home/user/project/runs/gpt-stdlib/c62a1f226dab/logs/attempt_{attempt}/node_%t.log' --cpus-per-task=2 \
  /usr/bin/python3 -m slurm_train torchrun /home/user/project/runs/gpt-stdlib/c62a1f226dab
