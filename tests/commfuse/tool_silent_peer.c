// For test_timeout.py: rank 1 fails as PEER says, and the others wait for it as HOW says. Before that, all meet in a barrier and
// rank 0 prints "ready".
//
//     mpirun -np RANKS tool_silent_peer HOW PEER TIMEOUT_S [TRANSPORT]
//
// HOW: exchange, collective, blocking, barrier, fuse, bind, end
//      send    rank 0 has received rank 2's message, and only its own message to rank 1 is stuck
//      late    like exchange, but rank 2 begins to wait a second later than rank 0
// PEER: dead, frozen
//       computes   for a long time
//       elsewhere  waits for rank 0 in another operation
//       chain      waits for rank 2 in another operation, which is frozen
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "commfuse/base/die.h"
#include "commfuse/fuse.h"

// COUNT: more than a library sends without being asked.
enum { SILENCE_S = 120, COUNT = 8 << 20 };

static const char usage[] = "mpirun -np RANKS tool_silent_peer exchange|send|late|collective|blocking|barrier|fuse|bind|end "
                            "dead|frozen|computes|elsewhere|chain TIMEOUT_S [TRANSPORT]";

static float *out, *in; // (N, COUNT), (COUNT): device memory

static bool is(const char *word, const char *name) {
    return strcmp(word, name) == 0;
}

static void run(cf_transport *transport, cf_request request) {
    cf_stream *stream = cf_stream_create();
    transport->post(transport, &request, 1, stream);
    transport->wait(transport, &request, CF_COMPLETE, stream);
    cf_stream_sync(stream);
    cf_stream_free(stream);
}

static cf_request receive(const cf_group *group, int from, const char *label, int layer, int step) {
    cf_request r = cf_request_of(CF_REQUEST_EXCHANGE, group, CF_FP32, label);
    r.recv_from = from, r.recv = in, r.recv_count = COUNT;
    r.layer = layer, r.step = step;
    return r;
}

// --- the ranks that fail ---

static void freeze(void) {
    raise(SIGSTOP);
    sleep(SILENCE_S);
}

static void fail(cf_transport *transport, const cf_group *group, const char *how) {
    if (is(how, "dead")) raise(SIGKILL);
    if (is(how, "frozen")) freeze();
    if (is(how, "elsewhere")) run(transport, receive(group, 0, "all-gather att.qkv", 2, 42));
    if (is(how, "chain")) run(transport, receive(group, 2, "all-gather att.qkv", 2, 42));
    sleep(SILENCE_S);
}

// --- the others ---

static void wait_by_hand(cf_transport *transport, const cf_group *group, const char *how) {
    cf_request request = receive(group, 1, "reduce-scatter mlp.fc2", 7, 41);
    request.send = out;
    request.send_count = request.stride = COUNT;
    if (is(how, "send")) {
        request.send_to = transport->rank == 0 ? 1 : 0;
        request.recv_from = transport->rank == 0 ? 2 : -1;
    } else if (is(how, "barrier"))
        request.kind = CF_REQUEST_BARRIER;
    else if (is(how, "collective") || is(how, "blocking"))
        request.kind = CF_REQUEST_REDUCE_SCATTER;
    if (request.kind != CF_REQUEST_EXCHANGE) request.send_to = request.recv_from = -1;
    request.blocking = is(how, "blocking");
    if (is(how, "late") && transport->rank == 2) sleep(1);
    run(transport, request);
    if (transport->rank != 0) sleep(SILENCE_S); // rank 2 has nothing to wait for
}

static void wait_in_fuse(cf_transport *transport, const cf_group *group) {
    cf_context context = {.transport = transport, .stream = cf_stream_create(), .trace = cf_trace_create(), .step = 41};
    cf_fuse *fuse =
        cf_fuse_create(&context, (cf_fuse_config){"mlp.fc2", group, CF_REDUCE_SCATTER, CF_NO_COMPUTE, cf_algorithm_find("ring"), 1,
                                                  CF_FP32, COUNT, false, false, false, 0, false});
    cf_fuse_run(fuse, out, COUNT, 1, NULL, NULL, 7);
    cf_stream_sync(context.stream);
}

static void meet(cf_transport *transport, const cf_group *group) {
    cf_request barrier = receive(group, -1, "barrier", -1, 41);
    barrier.kind = CF_REQUEST_BARRIER;
    run(transport, barrier);
    if (transport->rank == 0) printf("ready\n");
    fflush(stdout);
}

int main(int argc, char **argv) {
    cf_transport *transport = cf_transport_create(argc == 5 ? argv[4] : "auto", &argc, &argv, 60);
    if (argc < 4 || argc > 5 || transport->size < 2) cf_die_together(usage, "%d arguments on %d ranks", argc - 1, transport->size);
    const char *how = argv[1], *peer = argv[2];
    cf_mesh mesh;
    cf_mesh_init(&mesh, transport->size, transport->rank, transport->size, 1);
    const cf_group *group = &mesh.tp_group;
    transport->bind(transport, &mesh.tp_group);
    out = cf_alloc(transport->size * (int64_t)COUNT * (int64_t)sizeof *out, "test");
    in = cf_alloc(COUNT * (int64_t)sizeof *in, "test");
    meet(transport, group); // a busy machine may need longer than TIMEOUT_S until here
    *transport->timeout_s = atof(argv[3]);
    if (transport->rank == 2 && is(peer, "chain"))
        freeze();
    else if (transport->rank == 1)
        fail(transport, group, peer);
    else if (is(how, "fuse"))
        wait_in_fuse(transport, group);
    else if (is(how, "bind"))
        transport->bind(transport, &mesh.world_group);
    else if (is(how, "end"))
        transport->close(transport);
    else
        wait_by_hand(transport, group, how);
    return 4; // no other rank has ended this one
}
