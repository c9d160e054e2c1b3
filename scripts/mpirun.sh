#!/bin/sh
# mpirun for ranks that all live on this machine, be it a laptop, a container or a CI runner: as root too,
# more ranks than cores, no pinning (two jobs would pin to the same cores). Whether ranks that wait give way is
# left to commfuse/transport_mpi.c.
#
#     scripts/mpirun.sh -np 2 ./train_gpt --tp 2 …
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec mpirun --oversubscribe --bind-to none "$@"
