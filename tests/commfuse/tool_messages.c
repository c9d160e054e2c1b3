// For test_messages.py: messages of many lengths between all ranks, all under way at once, in the device's memory.
//
//     mpirun -np RANKS tool_messages TRANSPORT LENGTH…
//
// Each rank sends a message of every length (bytes) to each other rank. An exchange sends to the rank `by` ranks further and
// receives from the rank `by` ranks before. No two ranks begin with the same length, so the halves of an exchange differ. Byte i of
// a message is a function of length, sender, receiver and i. Messages go in waves, of which two are under way at any time, so that
// a transport reuses its memory while other parts of it are in use.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "commfuse/base/die.h"
#include "commfuse/transport.h"

enum { LENGTHS_MAX = 16, RANKS_MAX = 64, WAVES = 3, TIMEOUT_S = 60 };

typedef struct message {
    cf_request request;
    uint8_t *out, *in, *seen; // device memory
} message;

typedef struct wave {
    message message[LENGTHS_MAX * RANKS_MAX];
    int count;
} wave;

static int64_t length[LENGTHS_MAX];
static int lengths;

static uint8_t content(int64_t bytes, int from, int to, int64_t i) {
    uint64_t x = ((uint64_t)bytes * 64 + (uint64_t)from) * 64 + (uint64_t)to;
    x = (x ^ (uint64_t)i) * 0x9e3779b97f4a7c15u;
    return (uint8_t)(x >> 56);
}

static void fill(uint8_t *data, int64_t bytes, int from, int to) {
    for (int64_t i = 0; i < bytes; i++) data[i] = content(bytes, from, to, i);
}

// Of the i-th message of `sender`.
static int64_t length_of(int i, int sender) {
    return length[(i + sender) % lengths];
}

static uint8_t *host_memory(int64_t bytes) {
    uint8_t *host = malloc((size_t)bytes + 1);
    if (!host) cf_die(NULL, "out of memory for a message of %lld bytes", (long long)bytes);
    return host;
}

static void prepare(const cf_group *group, message *m, int by, int i, cf_stream *stream) {
    int from = (group->rank - by + group->size) % group->size, to = (group->rank + by) % group->size;
    int64_t out_bytes = length_of(i, group->rank), in_bytes = length_of(i, from);
    uint8_t *host = host_memory(out_bytes);
    fill(host, out_bytes, group->rank, to);
    m->out = cf_alloc(out_bytes, "messages");
    m->in = cf_alloc(in_bytes, "messages");
    m->seen = cf_alloc(in_bytes, "messages");
    cf_copy(m->out, host, out_bytes, stream);
    cf_stream_sync(stream);
    free(host);
    m->request = cf_request_of(CF_REQUEST_EXCHANGE, group, CF_BYTE, "message");
    m->request.send_to = to, m->request.send = m->out, m->request.send_count = out_bytes;
    m->request.recv_from = from, m->request.recv = m->in, m->request.recv_count = in_bytes;
}

// As the executor does: without a wait if test() says that it is not needed.
static void receive(cf_transport *t, message *m, cf_stream *stream) {
    if (!t->test(t, &m->request, CF_COMPLETE, stream)) t->wait(t, &m->request, CF_COMPLETE, stream);
    if (!t->test(t, &m->request, CF_ARRIVED, stream)) cf_die(NULL, "a message has not arrived after the wait for it");
    cf_copy(m->seen, m->in, m->request.recv_count, stream);
}

static void check(cf_transport *t, message *m, cf_stream *stream) {
    int64_t bytes = m->request.recv_count;
    uint8_t *host = host_memory(bytes);
    cf_copy(host, m->seen, bytes, stream);
    cf_stream_sync(stream);
    int from = m->request.recv_from, to = t->rank;
    for (int64_t i = 0; i < bytes; i++)
        if (host[i] != content(bytes, from, to, i))
            cf_die(NULL, "message of %lld bytes from rank %d to %d: byte %lld is wrong", (long long)bytes, from, to, (long long)i);
    free(host);
    cf_free(m->out);
    cf_free(m->in);
    cf_free(m->seen);
}

static void prepare_wave(const cf_group *group, wave *w, cf_stream *stream) {
    w->count = 0;
    for (int by = 1; by < group->size; by++)
        for (int i = 0; i < lengths; i++) prepare(group, &w->message[w->count++], by, i, stream);
}

static void post_wave(cf_transport *t, wave *w, cf_stream *stream) {
    for (int i = 0; i < w->count; i++) t->post(t, &w->message[i].request, 1, stream);
}

// Begins in the middle: a wait must suffice for all earlier messages, and for none of the later ones.
static void finish_wave(cf_transport *t, wave *w, cf_stream *stream) {
    int half = w->count / 2;
    for (int i = 0; i < w->count; i++) receive(t, &w->message[(half + i) % w->count], stream);
    for (int i = 0; i < w->count; i++) check(t, &w->message[i], stream);
}

int main(int argc, char **argv) {
    if (argc < 3) cf_die("tool_messages TRANSPORT LENGTH…", "too few arguments");
    cf_transport *t = cf_transport_create(argv[1], &argc, &argv, TIMEOUT_S);
    cf_mesh mesh;
    cf_mesh_init(&mesh, t->size, t->rank, 1, t->size);
    t->bind(t, &mesh.world_group);
    cf_stream *stream = cf_stream_create();
    static wave waves[2];
    lengths = argc - 2;
    if (lengths > LENGTHS_MAX || t->size > RANKS_MAX) cf_die(NULL, "too many lengths or ranks");
    for (int i = 0; i < lengths; i++) length[i] = atoll(argv[2 + i]);
    for (int i = 0; i < 2; i++) prepare_wave(&mesh.world_group, &waves[i], stream);
    post_wave(t, &waves[0], stream);
    for (int i = 1; i < WAVES; i++) {
        wave *now = &waves[(i - 1) % 2];
        post_wave(t, &waves[i % 2], stream);
        finish_wave(t, now, stream);
        if (i + 1 < WAVES) prepare_wave(&mesh.world_group, now, stream);
    }
    finish_wave(t, &waves[(WAVES - 1) % 2], stream);
    if (t->rank == 0) printf("all as sent\n");
    cf_stream_free(stream);
    t->close(t);
    cf_mesh_free(&mesh);
    return 0;
}
