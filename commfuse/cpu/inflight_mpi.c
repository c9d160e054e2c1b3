// See inflight_mpi.h.
#include "inflight_mpi.h"
#include <limits.h>

enum {
    CHUNK = 256 << 10, // bytes
    BULK_CHUNK = 128 << 10,
    UNDER_WAY = 2 // chunks of a queue: one travels, one is ready to follow. Bulk beside other messages has one
};

typedef struct cf_flight { // a request and its MPI requests
    cf_request *request;
    int recvs, sends;           // how many; a collective counts as one send
    int posted, received, sent; // sends posted; receives and sends done, in order
    bool started;               // exchanges: at once
    bool moving;                // the first chunk was sent or has arrived
    cf_memory parts;            // MPI requests: first the receives, then the sends
    cf_memory stage;            // reduce-scatter: a block of each rank, to be summed
    bool staged;                // all of them have arrived
} cf_flight;

// --- memory ---

static cf_memory get(cf_pool *p, int64_t bytes, const cf_request *r) {
    cf_memory m = {0};
    if (p->spares > 0) m = p->spare[--p->spares];
    if (m.bytes >= bytes) return m;
    free(m.at);
    return (cf_memory){cf_host_alloc(bytes, 1, r->label), bytes};
}

static void put_back(cf_pool *p, cf_memory m) {
    if (!m.at) return;
    p->spare = cf_host_grow(p->spare, &p->capacity, p->spares + 1, sizeof *p->spare, "transfers");
    p->spare[p->spares++] = m;
}

static void free_all(cf_pool *p) {
    for (int i = 0; i < p->spares; i++) free(p->spare[i].at);
    free(p->spare);
}

// --- messages in chunks ---

static int64_t chunk_bytes(const cf_request *r) {
    return r->bulk ? BULK_CHUNK : CHUNK;
}

static int chunks(const cf_request *r, int64_t bytes) {
    return bytes == 0 ? 1 : (int)((bytes + chunk_bytes(r) - 1) / chunk_bytes(r));
}

static int chunk_length(const cf_request *r, int64_t bytes, int i) {
    int64_t left = bytes - i * chunk_bytes(r);
    return (int)(left < chunk_bytes(r) ? left : chunk_bytes(r));
}

static void start_exchange(cf_inflight *all, cf_flight *f, cf_request *r) {
    int64_t size = cf_dtype_size(r->dtype), bytes = r->recv_count * size;
    f->sends = r->send_to >= 0 ? chunks(r, r->send_count * size) : 0;
    f->recvs = r->recv_from >= 0 ? chunks(r, bytes) : 0;
    f->parts = get(&all->lists, (f->sends + f->recvs) * (int64_t)sizeof(MPI_Request), r);
    MPI_Request *part = f->parts.at;
    for (int i = 0; i < f->recvs; i++)
        cf_mpi_check(MPI_Irecv((char *)r->recv + i * chunk_bytes(r), chunk_length(r, bytes, i), MPI_BYTE, r->recv_from, r->recv_tag,
                               *(MPI_Comm *)r->group->native, &part[i]),
                     "MPI_Irecv", r);
}

static void now_moving(cf_flight *f) {
    if (!f->moving) f->request->begin = cf_event_record(NULL);
    f->moving = true;
}

// Sends the chunks that have room in their queue. Called in the order in which exchanges were posted. (Bulk never stops
// altogether: other messages may be stuck until a peer has received bulk.)
static bool send_more(cf_inflight *all, cf_flight *f) {
    cf_request *r = f->request;
    const int before = f->posted;
    if (before == f->sends || !cf_reached(r->after[0], CF_ARRIVED) || !cf_reached(r->after[1], CF_ARRIVED)) return false;
    const int64_t bytes = r->send_count * cf_dtype_size(r->dtype);
    MPI_Request *part = f->parts.at;
    int *queues = all->under_way[r->group->world[r->send_to]];
    for (; f->posted < f->sends && queues[r->bulk] < (r->bulk && queues[false] > 0 ? 1 : UNDER_WAY); f->posted++) {
        cf_mpi_check(MPI_Isend((const char *)r->send + f->posted * chunk_bytes(r), chunk_length(r, bytes, f->posted), MPI_BYTE,
                               r->send_to, r->send_tag, *(MPI_Comm *)r->group->native, &part[f->recvs + f->posted]),
                     "MPI_Isend", r);
        queues[r->bulk]++;
    }
    if (before == 0 && f->posted > 0) now_moving(f);
    return f->posted > before;
}

// --- collectives ---

// A block of `count` elements, of which one starts every `stride` elements.
static MPI_Datatype strided(const cf_request *r, MPI_Datatype type, int count) {
    MPI_Datatype block, resized;
    cf_mpi_check(MPI_Type_contiguous(count, type, &block), "MPI_Type_contiguous", r);
    MPI_Aint extent = (MPI_Aint)(r->stride * cf_dtype_size(r->dtype));
    cf_mpi_check(MPI_Type_create_resized(block, 0, extent, &resized), "MPI_Type_create_resized", r);
    cf_mpi_check(MPI_Type_commit(&resized), "MPI_Type_commit", r);
    MPI_Type_free(&block);
    return resized;
}

// Sums the blocks that have arrived, on rank j in the order j + 1, j + 2, …, j, as exchanges are summed.
static void sum_stage(const cf_flight *f) {
    const cf_request *r = f->request;
    const int64_t bytes = r->send_count * cf_dtype_size(r->dtype);
    const int N = r->group->size, first = r->group->rank + 1;
    cf_copy(r->recv, (const char *)f->stage.at + first % N * bytes, bytes, NULL);
    for (int i = 1; i < N; i++)
        cf_add(r->recv, (const char *)f->stage.at + (first + i) % N * bytes, 1, 0, r->send_count, r->dtype, NULL);
}

#define COLLECTIVE(blocking_call, other, ...)                                                                                      \
    cf_mpi_check(r->blocking ? blocking_call(__VA_ARGS__) : other(__VA_ARGS__, f->parts.at), #blocking_call, r)

// A reduce-scatter is an all-to-all and a sum, which send as little as possible. The library's own is slower: in Open MPI 4 the
// non-blocking ones and MPI_Reduce_scatter_block reduce everything to rank 0, which scatters: three times the time on two ranks.
// MPI_Reduce_scatter sends as little as this, but for every call takes new memory from the system: for large blocks over shared
// memory most of its time. (tests/bench/bench_collectives.c prints the times of each.)
static void start_collective(cf_inflight *all, cf_flight *f, cf_request *r) {
    MPI_Comm comm = *(MPI_Comm *)r->group->native;
    f->sends = f->posted = !r->blocking; // one MPI request, or none
    f->parts = get(&all->lists, (int64_t)sizeof(MPI_Request), r);
    if (r->kind == CF_REQUEST_BARRIER) {
        f->sends = f->posted = 1;
        cf_mpi_check(MPI_Ibarrier(comm, f->parts.at), "MPI_Ibarrier", r);
        return;
    }
    if (r->send_count > INT_MAX)
        cf_die("use ring, or slice with more slices",
               "%s: a native collective of %lld elements per rank exceeds MPI's int limit, %d", r->label, (long long)r->send_count,
               INT_MAX);
    const int64_t element = cf_dtype_size(r->dtype);
    const bool sums = r->kind == CF_REQUEST_REDUCE_SCATTER, plain = sums || r->stride == r->send_count;
    const int count = (int)r->send_count, n = plain ? count : 1;
    MPI_Datatype type = element == 8 ? MPI_INT64_T : element == 4 ? MPI_FLOAT : element == 2 ? MPI_UINT16_T : MPI_BYTE;
    MPI_Datatype block = plain ? type : strided(r, type, count);
    if (r->kind == CF_REQUEST_ALLGATHER) {
        const bool in_place = r->send == (char *)r->recv + r->group->rank * r->stride * element;
        COLLECTIVE(MPI_Allgather, MPI_Iallgather, in_place ? MPI_IN_PLACE : r->send, count, type, r->recv, n, block, comm);
    } else {
        if (sums) f->stage = get(&all->stages, r->send_count * r->group->size * element, r);
        COLLECTIVE(MPI_Alltoall, MPI_Ialltoall, r->send, n, block, sums ? f->stage.at : r->recv, n, block, comm);
    }
    if (!plain) MPI_Type_free(&block); // freed when the last use has ended
    f->staged = sums && r->blocking;
}

// --- all of them ---

void cf_inflight_open(cf_inflight *all, int ranks) {
    *all = (cf_inflight){.under_way = cf_host_alloc(ranks, sizeof *all->under_way, "transfers")};
}

void cf_inflight_close(cf_inflight *all) {
    free_all(&all->lists);
    free_all(&all->stages);
    free(all->active);
    free(all->under_way);
}

void cf_inflight_add(cf_inflight *all, cf_request *r) {
    all->active = cf_host_grow(all->active, &all->capacity, all->actives + 1, sizeof *all->active, "transfers");
    cf_flight *f = &all->active[all->actives++];
    *f = (cf_flight){.request = r, .started = r->kind == CF_REQUEST_EXCHANGE};
    if (f->started) start_exchange(all, f, r);
}

// Collectives of a group must start in one order on all ranks: that of the program. They run one at a time, as on a stream:
// otherwise they would share the wire, and the first would end with the last. A blocking one waits until all chunks of other
// requests are posted. earlier: number of flights before this one.
static bool may_start(const cf_inflight *all, const cf_request *r, int earlier) {
    if (!cf_reached(r->after[0], CF_ARRIVED) || !cf_reached(r->after[1], CF_ARRIVED)) return false;
    for (int i = 0; i < all->actives; i++) {
        const cf_flight *f = &all->active[i];
        if (i < earlier && f->request->kind != CF_REQUEST_EXCHANGE && f->request->group == r->group && !f->staged) return false;
        if (r->blocking && f->posted < f->sends) return false;
    }
    return true;
}

static bool part_done(cf_flight *f, int i) {
    int done = 0;
    cf_mpi_check(MPI_Test((MPI_Request *)f->parts.at + i, &done, MPI_STATUS_IGNORE), "MPI_Test", f->request);
    return done;
}

// Tests receives apart from sends: a request that waits for them can start, and a time-out names the missing half. Sums a
// reduce-scatter in the next call, so that the next collective is on its way during the sum.
static bool has_ended(cf_inflight *all, cf_flight *f, bool *news) {
    cf_request *r = f->request;
    if (f->staged) {
        sum_stage(f);
        return true;
    }
    while (f->received < f->recvs && part_done(f, f->received)) f->received++;
    if (f->received > 0) now_moving(f);
    for (; f->sent < f->posted && part_done(f, f->recvs + f->sent); f->sent++)
        if (r->kind == CF_REQUEST_EXCHANGE) --all->under_way[r->group->world[r->send_to]][r->bulk];
    if (f->recvs > 0 && f->received == f->recvs && !r->received) {
        __atomic_store_n(&r->received, 1, __ATOMIC_SEQ_CST);
        *news = true;
    }
    if (f->received < f->recvs || f->sent < f->sends) return false;
    f->staged = f->stage.at != NULL;
    *news |= f->staged;
    return !f->staged;
}

// Flights keep their order: the request posted first also sends first.
bool cf_inflight_move(cf_inflight *all, bool *news) {
    bool moved = false;
    int left = 0;
    all->collective = false;
    for (int i = 0; i < all->actives; i++) {
        cf_flight *f = &all->active[i];
        cf_request *r = f->request;
        if (!f->started && may_start(all, r, left)) {
            f->started = moved = true;
            r->begin = cf_event_record(NULL);
            start_collective(all, f, r);
        }
        if (!f->started || !has_ended(all, f, news)) {
            moved |= send_more(all, f);
            all->collective |= r->kind != CF_REQUEST_EXCHANGE && f->started && !f->staged;
            all->active[left++] = *f;
            continue;
        }
        put_back(&all->lists, f->parts);
        put_back(&all->stages, f->stage);
        r->end = cf_event_record(NULL);
        __atomic_store_n(&r->state, CF_DONE, __ATOMIC_SEQ_CST); // from here on the caller may reuse *r
        *news = true;
    }
    all->actives = left;
    return moved || *news;
}
