#!/bin/bash
# gpt-stdlib/4f7cd9cd41c6: global batch 60 = 10 local x 6 ranks x 1 accumulation
# Works by hand as well: `sbatch submit.sh`, or `bash submit.sh` inside an salloc.
#SBATCH --job-name=gpt-stdlib-4f7cd9cd41c6
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=12
#SBATCH --output=/home/user/project/runs/gpt-stdlib/4f7cd9cd41c6/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --chdir=/home/user/project
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=6
#SBATCH --requeue
#SBATCH --signal=USR2@120

set -e
export PYTHONUNBUFFERED=1

cd /
exec /usr/bin/python3 -m slurm_train supervise /home/user/project/runs/gpt-stdlib/4f7cd9cd41c6 -- \
  srun --het-group=0,1 --distribution=block --job-name='attempt_{attempt}' --kill-on-bad-exit=1 --wait=60 --open-mode=append --export=ALL --output='/home/user/project/runs/gpt-stdlib/4f7cd9cd41c6/logs/attempt_{attempt}/node_%t.log' --cpu-bind=none \
  /usr/bin/python3 -m slurm_train torchrun /home/user/project/runs/gpt-stdlib/4f7cd9cd41c6
