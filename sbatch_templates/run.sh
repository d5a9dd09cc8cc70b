#!/bin/bash
# {title}
# Works by hand as well: `sbatch submit.sh`, or `bash submit.sh` inside an salloc.
{sbatch}

set -e
{exports}
{setup}
cd /
exec {python} -m slurm_train supervise {run} -- \
  {srun} \
  {worker}
