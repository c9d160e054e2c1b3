#!/bin/sh
# mpirun for ranks that are all on this machine, such as a laptop, a container or a CI runner: also as root, with more ranks than
# cores, without pinning (two jobs would pin to the same cores). commfuse/cpu/transport_mpi.c decides whether waiting ranks yield.
#
#     scripts/mpirun.sh -np 2 ./train_gpt --tp 2 …
#
# Variables, because the mpirun of each library refuses the flags of another.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none # Open MPI 4
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none # Open MPI 5
export I_MPI_PIN=0 MV2_ENABLE_AFFINITY=0 # Intel MPI, MVAPICH; MPICH pins only if asked to
# Closed standard streams would become pipes of its own.
exec 9<>/dev/null
{ true 8<&0; } 2>&9 || exec <&9
{ true 8>&1; } 2>&9 || exec >&9
{ true 8>&2; } || exec 2>&9
exec mpirun "$@" 9>&-
