// For test_messages.py: messages of many lengths between all ranks, all under way at once, in the device's memory.
//
//     mpirun -np RANKS tool_messages TRANSPORT LENGTH…
//
// Each rank sends a message of every length (bytes) to each other one, exchange by exchange: to the one `by` behind it, from
// the one `by` in front of it. Byte i of a message is a function of length, sender, receiver and i. Twice, so that what a
// transport keeps is used again.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "commfuse/die.h"
#include "commfuse/transport.h"

enum { LENGTHS_MAX = 16, ROUNDS = 2, TIMEOUT_S = 60 };

typedef struct message {
    cf_request request;
    int64_t bytes;
    uint8_t *out, *in; // device memory
} message;

static uint8_t content(int64_t bytes, int from, int to, int64_t i) {
    uint64_t x = ((uint64_t)bytes * 64 + (uint64_t)from) * 64 + (uint64_t)to;
    x = (x ^ (uint64_t)i) * 0x9e3779b97f4a7c15u;
    return (uint8_t)(x >> 56);
}

static void fill(uint8_t *data, int64_t bytes, int from, int to) {
    for (int64_t i = 0; i < bytes; i++) data[i] = content(bytes, from, to, i);
}

static void post(cf_transport *t, const cf_group *group, message *m, int by, cf_stream *stream) {
    int from = (group->rank - by + group->size) % group->size, to = (group->rank + by) % group->size;
    uint8_t *host = malloc((size_t)m->bytes + 1);
    if (!host) cf_die(NULL, "out of memory for a message of %lld bytes", (long long)m->bytes);
    fill(host, m->bytes, group->rank, to);
    m->out = cf_alloc(m->bytes, "messages");
    m->in = cf_alloc(m->bytes, "messages");
    cf_copy(m->out, host, m->bytes, stream);
    cf_stream_sync(stream);
    free(host);
    m->request = (cf_request){.group = group,
                              .dtype = CF_BYTE,
                              .send_to = to,
                              .recv_from = from,
                              .send = m->out,
                              .recv = m->in,
                              .send_count = m->bytes,
                              .recv_count = m->bytes,
                              .label = "message",
                              .layer = -1,
                              .step = -1};
    t->post(t, &m->request, stream);
}

static void check(cf_transport *t, message *m, cf_stream *stream) {
    uint8_t *host = malloc((size_t)m->bytes + 1);
    if (!host) cf_die(NULL, "out of memory for a message of %lld bytes", (long long)m->bytes);
    t->wait(t, &m->request, CF_COMPLETE, stream);
    if (!t->test(t, &m->request, CF_ARRIVED)) cf_die(NULL, "what has been waited for has not arrived");
    cf_copy(host, m->in, m->bytes, stream);
    cf_stream_sync(stream);
    int from = m->request.recv_from, to = t->rank;
    for (int64_t i = 0; i < m->bytes; i++)
        if (host[i] != content(m->bytes, from, to, i))
            cf_die(NULL, "message of %lld bytes from rank %d to %d: byte %lld is wrong", (long long)m->bytes,
                   from, to, (long long)i);
    free(host);
    cf_free(m->out);
    cf_free(m->in);
}

int main(int argc, char **argv) {
    if (argc < 3) cf_die("tool_messages TRANSPORT LENGTH…", "too few arguments");
    cf_transport *t = cf_transport_create(argv[1], &argc, &argv, TIMEOUT_S);
    cf_mesh mesh;
    cf_mesh_init(&mesh, t->size, t->rank, 1, t->size);
    t->configure(t, 1, TIMEOUT_S);
    t->bind(t, &mesh.world_group);
    cf_stream *stream = cf_stream_create();
    static message all[LENGTHS_MAX * 64];
    int lengths = argc - 2;
    if (lengths > LENGTHS_MAX || t->size > 64) cf_die(NULL, "too many lengths or ranks");
    for (int round = 0; round < ROUNDS; round++) {
        int count = 0;
        for (int by = 1; by < t->size; by++)
            for (int i = 0; i < lengths; i++) {
                all[count].bytes = atoll(argv[2 + i]);
                post(t, &mesh.world_group, &all[count++], by, stream);
            }
        while (count > 0)
            check(t, &all[--count], stream); // the last first: waiting for it must not suffice too early
    }
    if (t->rank == 0) printf("all as sent\n");
    cf_stream_free(stream);
    t->close(t);
    cf_mesh_free(&mesh);
    return 0;
}
