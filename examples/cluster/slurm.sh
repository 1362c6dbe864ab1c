#!/bin/bash
# Change: nodes, tasks and GPUs per node (one task per GPU), script. Run: sbatch slurm.sh train.py
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
srun python "$@"
