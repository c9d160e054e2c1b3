// For test_timeout.py: rank 1 goes silent, the others wait for it in the way the argument names. send: rank 0 has
// received what rank 2 owes it, and only its own message to rank 1 is stuck.
//
//     mpirun -np RANKS tool_silent_peer exchange|send|collective|blocking|barrier|fuse TIMEOUT_S
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "commfuse/die.h"
#include "commfuse/fuse.h"

enum { SILENCE_S = 120, COUNT = 4 << 20 }; // more than a library sends before it is asked for

static void wait_by_hand(cf_transport *transport, const cf_group *group, const char *how) {
    static float out[2 * COUNT], in[COUNT];
    cf_stream *stream = cf_stream_create();
    cf_request request = {.group = group,
                          .dtype = CF_FP32,
                          .send_to = -1,
                          .recv_from = -1,
                          .send = out,
                          .recv = in,
                          .send_count = COUNT,
                          .stride = COUNT,
                          .label = "reduce-scatter mlp.fc2",
                          .layer = 7,
                          .step = 41};
    if (strcmp(how, "exchange") == 0) {
        request.recv_from = 1;
        request.recv_count = COUNT;
        request.send_count = 0;
    } else if (strcmp(how, "send") == 0) {
        request.send_to = transport->rank == 0 ? 1 : 0;
        request.recv_from = transport->rank == 0 ? 2 : -1;
        request.recv_count = transport->rank == 0 ? COUNT : 0;
    } else if (strcmp(how, "barrier") == 0)
        request.kind = CF_REQUEST_BARRIER;
    else
        request.kind = CF_REQUEST_REDUCE_SCATTER;
    request.blocking = strcmp(how, "blocking") == 0;
    transport->post(transport, &request, stream);
    transport->wait(transport, &request, CF_COMPLETE, stream);
    if (transport->rank != 0) sleep(SILENCE_S); // rank 2 has nothing to wait for
}

static void wait_in_fuse(cf_transport *transport, const cf_group *group) {
    static float full[2 * COUNT];
    cf_context context = {.transport = transport,
                          .stream = cf_stream_create(),
                          .trace = cf_trace_create(),
                          .step = 41};
    cf_fuse *fuse =
        cf_fuse_create(&context, (cf_fuse_plan){"mlp.fc2", group, CF_REDUCE_SCATTER, CF_NO_COMPUTE,
                                                CF_MODE_COMMFUSE, CF_RING, 1, CF_FP32, COUNT, false, false});
    cf_fuse_run(fuse, full, COUNT, 1, NULL, NULL, 7);
}

int main(int argc, char **argv) {
    cf_transport *transport = cf_transport_create("auto", &argc, &argv, 60);
    if (argc != 3 || transport->size < 2)
        cf_die_together(
            "mpirun -np RANKS tool_silent_peer exchange|send|collective|blocking|barrier|fuse TIMEOUT_S",
            "%d arguments on %d ranks", argc - 1, transport->size);
    transport->configure(transport, 1, atof(argv[2]));
    cf_mesh mesh;
    cf_mesh_init(&mesh, transport->size, transport->rank, transport->size, 1);
    transport->bind(transport, &mesh.tp_group);
    if (transport->rank == 1) {
        sleep(SILENCE_S);
        return 3; // nobody has ended this rank
    }
    if (strcmp(argv[1], "fuse") == 0)
        wait_in_fuse(transport, &mesh.tp_group);
    else
        wait_by_hand(transport, &mesh.tp_group, argv[1]);
    return 4; // the wait has returned
}
