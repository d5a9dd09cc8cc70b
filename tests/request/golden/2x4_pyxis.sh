#!/bin/bash
# gpt-stdlib/ed9b3c8f8242: global batch 64 = 8 local x 8 ranks x 1 accumulation
# Works by hand as well: `sbatch submit.sh`, or `bash submit.sh` inside an salloc.
#SBATCH --job-name=gpt-stdlib-ed9b3c8f8242
#SBATCH --nodes=2
#SBATCH --ntasks=8
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --output=/scratch/me/runs/gpt-stdlib/ed9b3c8f8242/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/project
#SBATCH --requeue
#SBATCH --signal=USR2@120

set -e
export PYTHONUNBUFFERED=1
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0

cd /
exec /opt/venv/bin/python -m slurm_train supervise /scratch/me/runs/gpt-stdlib/ed9b3c8f8242 -- \
  srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --distribution=block --job-name='attempt_{attempt}' --kill-on-bad-exit=1 --wait=60 --open-mode=append --export=ALL --output='/scratch/me/runs/gpt-stdlib/ed9b3c8f8242/logs/attempt_{attempt}/rank_%t.log' --container-image='nvcr.io#nvidia/pytorch:24.12-py3' --container-mounts=/opt/venv/lib/python3.11/site-packages/slurm_train:/opt/slurm_train/slurm_train:ro,/scratch/me/runs:/scratch/me/runs,/home/me/project:/home/me/project,/shared/books:/shared/books,/datasets:/data:ro,/scratch2:/scratch2 --container-workdir=/scratch/me/runs/gpt-stdlib/ed9b3c8f8242/code --container-env=SLURM_TRAIN_ATTEMPT,SLURM_TRAIN_PACK,MASTER_ADDR,MASTER_PORT,PYTHONUNBUFFERED,CUDA_VISIBLE_DEVICES,NCCL_SOCKET_IFNAME,GLOO_SOCKET_IFNAME,WANDB_API_KEY \
  env -u RANK -u LOCAL_RANK -u GROUP_RANK -u WORLD_SIZE -u LOCAL_WORLD_SIZE PYTHONPATH=/opt/slurm_train PYTHONNOUSERSITE=1 /usr/bin/python -m slurm_train worker /scratch/me/runs/gpt-stdlib/ed9b3c8f8242
