#!/bin/bash
# Runs ranks under a real SLURM on one node. Requires root, Debian's packages and a network:
#     bash tests/clusters/slurm.sh     # or make test-clusters
# SLURM is installed on overlays in private namespaces, which disappear with their last process.
set -e
cd "$(dirname "$0")/../.."
if [ "$1" != inside ]; then
    exec unshare --mount --pid --fork --kill-child --mount-proc bash "$0" inside
fi
mount -t tmpfs none /mnt
for folder in usr etc var; do
    mkdir -p /mnt/$folder/new /mnt/$folder/work
    mount -t overlay none -o "lowerdir=/$folder,upperdir=/mnt/$folder/new,workdir=/mnt/$folder/work" /$folder
done
mount -t tmpfs none /run
printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
chmod +x /usr/sbin/policy-rc.d
export DEBIAN_FRONTEND=noninteractive
mkdir -p /run/lock /run/munge
apt-get update -qq
apt-get install -qq --no-install-recommends munge slurmd slurmctld slurm-client > /mnt/apt.log 2>&1 || { cat /mnt/apt.log; exit 1; }
mkdir -p /var/spool/slurmctld /var/spool/slurmd
chown munge: /run/munge
cat > /etc/slurm/slurm.conf <<CONF
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
NodeName=$(hostname) NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
CONF
runuser -u munge -- /usr/sbin/munged
slurmctld
slurmd
export PYTHONPATH=tests/without:. TF_CPP_MIN_LOG_LEVEL=3
# Run the example with the resources of this machine.
timeout 120 sbatch --wait --overcommit --nodes=1 --ntasks-per-node=2 --gpus-per-node=0 -o /mnt/step.txt \
    examples/cluster/slurm.sh tests/jobs/starting.py sum || { cat /mnt/step.txt; exit 1; }
cat /mnt/step.txt
timeout 120 srun -n1 python -m tfposeidon run --per-node 2 -- python tests/jobs/starting.py sum | tee /mnt/run.txt
printf '#!/bin/sh\npython tests/jobs/starting.py sum\n' > /mnt/batch.sh
timeout 120 sbatch --wait --overcommit -n2 -o /mnt/batch.txt /mnt/batch.sh
cat /mnt/batch.txt
grep -c "of 2 rank(s).*sum 1" /mnt/step.txt | grep -qx 2
grep -c "of 2 rank(s).*sum 1" /mnt/run.txt | grep -qx 2
grep -q "rank 0 of 1 rank(s)" /mnt/batch.txt    # a batch script is one process
echo "all jobs under SLURM have the expected ranks"
