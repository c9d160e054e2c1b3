// ranks: 2 4
//
// The transport by itself: requests filled by hand, as the executor would fill them. The bytes of every message depend on sender,
// receiver and tag, so a message in another one's place is found.
#include "tests/commfuse/ranks.h"
#include <math.h>
#include <sys/resource.h>
#include <time.h>

enum { TIMEOUT_S = 60, MESSAGES = 32, CHAIN = 24, IDLE_MS = 1000, IDLE_CPU_MS = 50 };

static cf_transport *transport;
static cf_mesh mesh; // tp = all ranks
static cf_stream *stream;

static int ring(int by) {
    return ((mesh.tp_group.rank + by) % mesh.tp + mesh.tp) % mesh.tp;
}

static unsigned char byte_of(int from, int to, int tag, int64_t i) {
    return (unsigned char)(31 * from + 17 * to + 7 * tag + i + i / 251);
}

static void fill(unsigned char *data, int from, int to, int tag, int64_t count) {
    for (int64_t i = 0; i < count; i++) data[i] = byte_of(from, to, tag, i);
}

static void expect(const unsigned char *data, int from, int to, int tag, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        CHECK(data[i] == byte_of(from, to, tag, i), "rank %d to %d, tag %d: byte %lld of %lld is %d", from, to, tag, (long long)i,
              (long long)count, data[i]);
}

static void *allocate(int64_t bytes) {
    void *memory = calloc(1, (size_t)bytes + 1);
    CHECK(memory, "out of memory for %lld bytes", (long long)bytes);
    return memory;
}

static cf_request exchange(int to, const void *send, int from, void *recv, int64_t count, int tag) {
    cf_request r = cf_request_of(CF_REQUEST_EXCHANGE, &mesh.tp_group, CF_BYTE, "test exchange");
    r.send_to = to, r.send = send, r.send_count = to >= 0 ? count : 0;
    r.recv_from = from, r.recv = recv, r.recv_count = from >= 0 ? count : 0;
    r.send_tag = r.recv_tag = tag;
    return r;
}

static void post(cf_request *request) {
    request->posted = cf_event_record(stream);
    transport->post(transport, request, 1, stream);
}
static void finish(cf_request *request) {
    transport->wait(transport, request, CF_COMPLETE, stream);
    cf_stream_sync(stream);
    CHECK(transport->test(transport, request, CF_COMPLETE, stream), "%s: waited for and not done", request->label);
    double posted_ms = cf_event_ms(request->posted), begin_ms = cf_event_ms(request->begin), end_ms = cf_event_ms(request->end);
    const bool moves = request->kind != CF_REQUEST_EXCHANGE || request->send_to >= 0 || request->recv_from >= 0;
    CHECK((posted_ms <= begin_ms || !moves) && begin_ms <= end_ms && end_ms <= cf_now_ms(),
          "%s: posted at %g, in flight from %g to %g ms", request->label, posted_ms, begin_ms, end_ms);
}
static void run(cf_request request) {
    post(&request);
    finish(&request);
}
static void barrier(void) {
    run(cf_request_of(CF_REQUEST_BARRIER, &mesh.world_group, CF_BYTE, "test barrier"));
}

TEST(knows_its_world) {
    CHECK(transport->size == mesh.tp && transport->rank == mesh.tp_group.rank, "rank %d of %d", transport->rank, transport->size);
    CHECK(transport->local_size == transport->size && transport->local_rank == transport->rank,
          "all ranks are on this host, yet this is local rank %d of %d", transport->local_rank, transport->local_size);
    CHECK(transport->name && *transport->name, "a transport without a name");
}

// A rank whose threads, and the one that moves bytes, have a core each notices a message within 30 us. Where they take turns, all
// takes as many times longer, and no core is to spare.
TEST(costs_follow_the_cores) {
    for (int threads = 1; threads <= 8; threads *= 2) {
        const double own = (double)transport->local_size * threads / transport->local_cores;
        const double turns = fmax(1, own * (threads + 1) / threads);
        const cf_costs c = transport->set_threads(transport, threads);
        const double each[] = {c.latency_s / 30e-6,         c.message_s / 2e-6,  c.piece_s / 3e-6,
                               c.network_latency_s / 30e-6, 4e9 / c.bytes_per_s, 1.25e9 / c.network_bytes_per_s};
        for (int i = 0; i < 6; i++) CHECK(fabs(each[i] / turns - 1) < 1e-9, "cost %d is %g times that of idle cores", i, each[i]);
        CHECK(fabs(c.flops_per_s * fmax(1, own) / (60e9 * threads) - 1) < 1e-9, "%g flop/s", c.flops_per_s);
        CHECK(c.spare == (turns <= 1), "%d threads: spare is %d", threads, c.spare);
    }
    transport->set_threads(transport, 1);
}

// Sends in one order, receives in another: tags distinguish messages.
TEST(tags_out_of_order) {
    unsigned char out[MESSAGES][40], in[MESSAGES][40];
    cf_request sends[MESSAGES], receives[MESSAGES];
    int me = mesh.tp_group.rank, next = ring(1), previous = ring(-1);
    for (int i = 0; i < MESSAGES; i++) {
        fill(out[i], me, next, i, 40);
        sends[i] = exchange(next, out[i], -1, NULL, 40, i);
        receives[i] = exchange(-1, NULL, previous, in[i], 40, i);
    }
    for (int i = 0; i < MESSAGES; i++) {
        post(&sends[i]);
        post(&receives[(11 * i + 5) % MESSAGES]);
    }
    for (int i = MESSAGES - 1; i >= 0; i--) {
        finish(&sends[i]);
        finish(&receives[i]);
        expect(in[i], previous, me, i, 40);
    }
}

// Same tag, same pair: matched in the order posted.
TEST(one_tag_keeps_order) {
    unsigned char out[MESSAGES][8], in[MESSAGES][8];
    cf_request both[MESSAGES];
    for (int i = 0; i < MESSAGES; i++) {
        fill(out[i], ring(0), ring(1), i, 8);
        both[i] = exchange(ring(1), out[i], ring(-1), in[i], 8, 3);
        post(&both[i]);
    }
    for (int i = 0; i < MESSAGES; i++) {
        finish(&both[i]);
        expect(in[i], ring(-1), ring(0), i, 8);
    }
}

// A payload goes round the ring CHAIN times. Each hop is posted in advance and sent on after the previous one: sent sooner, it
// would be the zeros that its buffer held. (Moments prove nothing: the transport may notice two messages in either order.)
TEST(chain_of_after) {
    int64_t count = 3000;
    unsigned char *hop[CHAIN + 1];
    cf_request requests[CHAIN];
    for (int i = 0; i <= CHAIN; i++) hop[i] = allocate(count);
    fill(hop[0], ring(0), 0, 99, count);
    for (int i = 0; i < CHAIN; i++) {
        requests[i] = exchange(ring(1), hop[i], ring(-1), hop[i + 1], count, i);
        if (i > 0) requests[i].after[i % 2] = &requests[i - 1]; // in both places of `after`
        if (i > 1) requests[i].after[1 - i % 2] = &requests[i - 2];
        post(&requests[i]);
    }
    finish(&requests[CHAIN - 1]);
    for (int i = 0; i < CHAIN; i++) {
        finish(&requests[i]); // its sending half may last longer
        expect(hop[i + 1], ring(-1 - i), 0, 99, count);
    }
    for (int i = 0; i <= CHAIN; i++) free(hop[i]);
}

// The data to gather has not arrived when the collective is posted, nor after another group's barrier.
TEST(a_collective_comes_after_what_it_names) {
    enum { COUNT = 5, TAG = 3 };
    if (transport->in_order) return; // it would wait for a request that is posted later
    const int me = mesh.tp_group.rank, next = ring(1), before = ring(-1);
    unsigned char *out = allocate(COUNT), *in = allocate(COUNT), *all = allocate(mesh.tp * COUNT);
    fill(out, me, next, TAG, COUNT);
    cf_request receive = exchange(-1, NULL, before, in, COUNT, TAG), send = exchange(next, out, -1, NULL, COUNT, TAG);
    cf_request gather = cf_request_of(CF_REQUEST_ALLGATHER, &mesh.tp_group, CF_BYTE, "test all-gather");
    gather.send = in, gather.recv = all, gather.send_count = gather.stride = COUNT;
    gather.after[0] = &receive;
    post(&receive);
    post(&gather);
    barrier();
    run(send);
    finish(&receive);
    finish(&gather);
    for (int rank = 0; rank < mesh.tp; rank++) expect(all + rank * COUNT, (rank + mesh.tp - 1) % mesh.tp, rank, TAG, COUNT);
    free(out), free(in), free(all);
}

// An exchange has arrived, and a request that waits for it starts, while its own message still waits for a peer that does not
// receive yet. That message is longer than a library sends without being asked, and bulk, so it does not hold up others.
TEST(arrival_does_not_wait_for_the_receiver) {
    int64_t count = 8 << 20;
    int me = mesh.tp_group.rank, next = ring(1), before = ring(-1);
    unsigned char *out = allocate(count), *in = allocate(count), small[4] = {0}, word[4], follows[4] = {0};
    fill(out, me, next, 0, count);
    fill(word, me, next, 1, 4);
    cf_request big = exchange(next, out, before, small, 4, 0), late = exchange(-1, NULL, before, in, count, 0);
    cf_request little = exchange(next, word, -1, NULL, 4, 1);
    big.send_count = count;
    big.bulk = late.bulk = true;
    big.recv_tag = little.send_tag; // receives the neighbour's little message
    cf_request behind = exchange(next, word, before, follows, 4, 2);
    behind.after[0] = &big;
    post(&big);
    post(&behind);
    post(&little);
    transport->wait(transport, &big, CF_ARRIVED, stream);
    finish(&behind);
    expect(small, before, me, 1, 4);
    expect(follows, before, me, 1, 4);
    CHECK(!transport->test(transport, &big, CF_COMPLETE, stream), "a message of %lld bytes is gone, and nobody has received it",
          (long long)count);
    barrier(); // all ranks have checked that
    post(&late);
    finish(&late);
    finish(&big);
    finish(&little);
    expect(in, before, me, 0, count);
    free(out);
    free(in);
}

// A request that waits for another one, which waits for a slow peer, lets others pass.
TEST(unrelated_requests_overtake) {
    unsigned char held[4] = {0}, follows[4] = {0}, free_one[4] = {0}, out[3][4];
    int me = mesh.tp_group.rank, peer = me ^ 1;
    for (int tag = 0; tag < 3; tag++) fill(out[tag], me, peer, tag, 4);
    cf_request receive = exchange(-1, NULL, peer, held, 4, 0), send = exchange(peer, out[0], -1, NULL, 4, 0);
    cf_request behind = exchange(peer, out[1], peer, follows, 4, 1);
    cf_request other = exchange(peer, out[2], peer, free_one, 4, 2);
    behind.after[0] = &receive;
    post(&receive);
    post(&behind);
    post(&other);
    finish(&other); // though nobody has sent tag 0 yet
    CHECK(!transport->test(transport, &receive, CF_ARRIVED, stream) && !transport->test(transport, &behind, CF_ARRIVED, stream),
          "done before anything was sent");
    barrier(); // both have checked that
    post(&send);
    finish(&behind);
    finish(&receive);
    finish(&send);
    expect(held, peer, me, 0, 4);
    expect(follows, peer, me, 1, 4);
    expect(free_one, peer, me, 2, 4);
}

static cf_request bulk(int to, const void *send, int from, void *recv, int64_t count, int tag) {
    cf_request request = exchange(to, send, from, recv, count, tag);
    request.bulk = true;
    return request;
}

// While the first of two bulk messages waits for its receiver, the second does not arrive, but other messages and bulk for another
// peer do.
TEST(bulk_keeps_its_order_and_lets_others_pass) {
    int64_t count = (3 << 20) + 5; // many chunks, longer than a library sends without being asked
    int me = mesh.tp_group.rank, next = ring(1), before = ring(-1), after_next = ring(2), before_that = ring(-2);
    bool others = mesh.tp > 2;
    unsigned char *out[3], *in[3], word[4], note[4] = {0};
    for (int i = 0; i < 3; i++) {
        out[i] = allocate(count), in[i] = allocate(count);
        fill(out[i], me, i < 2 ? next : after_next, i, count);
    }
    fill(word, me, next, 3, 4);
    cf_request first = bulk(next, out[0], -1, NULL, count, 0), late = bulk(-1, NULL, before, in[0], count, 0);
    cf_request second = bulk(next, out[1], before, in[1], count, 1);
    cf_request elsewhere = bulk(others ? after_next : -1, out[2], others ? before_that : -1, in[2], count, 2);
    cf_request little = exchange(next, word, before, note, 4, 3);
    post(&first);
    post(&second);
    post(&elsewhere);
    post(&little);
    finish(&little);
    finish(&elsewhere);
    expect(note, before, me, 3, 4);
    if (others) expect(in[2], before_that, me, 2, count);
    nanosleep(&(struct timespec){0, 50000000}, NULL); // time in which the second could come
    CHECK(!transport->test(transport, &second, CF_ARRIVED, stream), "the second bulk message has passed the first");
    barrier(); // all ranks have checked that
    post(&late);
    finish(&second);
    finish(&late);
    finish(&first);
    for (int i = 0; i < 2; i++) expect(in[i], before, me, i, count);
    for (int i = 0; i < 3; i++) free(out[i]), free(in[i]);
}

// Lengths around those of chunks, one tag: checks the order and every byte.
TEST(bulk_of_any_length) {
    static const int64_t counts[] = {0, 1, 131071, 131072, 131073, 524288, 1 << 24, 3};
    enum { COUNTS = sizeof counts / sizeof counts[0] };
    unsigned char *out[COUNTS], *in[COUNTS];
    cf_request both[COUNTS];
    for (int i = 0; i < COUNTS; i++) {
        out[i] = allocate(counts[i]), in[i] = allocate(counts[i]);
        fill(out[i], ring(0), ring(1), i, counts[i]);
        both[i] = bulk(ring(1), out[i], ring(-1), in[i], counts[i], 4);
        post(&both[i]);
    }
    for (int i = COUNTS - 1; i >= 0; i--) {
        finish(&both[i]);
        expect(in[i], ring(-1), ring(0), i, counts[i]);
        CHECK(in[i][counts[i]] == 0, "a byte after a message of %lld", (long long)counts[i]);
    }
    for (int i = 0; i < COUNTS; i++) free(out[i]), free(in[i]);
}

TEST(nothing_to_carry) { // zero bytes, and halves that are absent
    unsigned char out = 0, in = 0;
    run(exchange(ring(1), &out, ring(-1), &in, 0, 0));
    run(exchange(ring(1), NULL, ring(-1), NULL, 0, 1));
    run(exchange(-1, NULL, -1, NULL, 0, 2));
    cf_request uneven = exchange(ring(1), &out, ring(-1), &in, 1, 3); // one half empty, the other not
    bool sends = mesh.tp_group.rank % 2 == 0;                         // (the number of ranks is even)
    out = 77;
    if (sends)
        uneven.recv_count = 0;
    else
        uneven.send_count = 0;
    run(uneven);
    CHECK(in == (sends ? 0 : 77), "received %d", in);
}

TEST(one_byte_to_64_mib) {
    for (int64_t count = 1; count <= (int64_t)64 << 20; count *= 4) {
        int64_t odd = count > 1 ? count - 1 : 1;
        unsigned char *out = allocate(odd), *in = allocate(odd + 1);
        fill(out, ring(0), ring(1), 5, odd);
        in[odd] = 0x5A;
        run(exchange(ring(1), out, ring(-1), in, odd, 5));
        expect(in, ring(-1), ring(0), 5, odd);
        CHECK(in[odd] == 0x5A, "a byte after a message of %lld", (long long)odd);
        free(out);
        free(in);
        barrier(); // not more than one size in memory
    }
}

TEST(bytes_are_counted) {
    float out[10] = {0}, in[10];
    int64_t before = transport->bytes_sent;
    cf_request request = exchange(ring(1), out, ring(-1), in, 10, 0);
    request.dtype = CF_FP32;
    run(request);
    run(exchange(-1, NULL, -1, NULL, 0, 1));
    barrier();
    int64_t sent = transport->bytes_sent - before;
    CHECK(sent == 40, "%lld bytes counted for 10 floats", (long long)sent);
}

// ---------------------------------------------------------------------------------------- collectives

static int64_t number(int from, int to, int64_t i) {
    return 1000 * from + 100 * to + i % 97;
}

static cf_request collective(cf_request_kind kind, const void *send, void *recv, int64_t count, int64_t stride, bool blocking) {
    cf_request r = cf_request_of(kind, &mesh.tp_group, CF_INT64, "test collective");
    r.send = send, r.recv = recv, r.send_count = count, r.stride = stride;
    r.blocking = blocking;
    return r;
}

static void gathers(int64_t count, int64_t stride, bool blocking, bool in_place) {
    int64_t *all = allocate(mesh.tp * stride * 8 + 8), *own = allocate(count * 8);
    for (int64_t i = 0; i < mesh.tp * stride; i++) all[i] = -1;
    int64_t *source = in_place ? all + mesh.tp_group.rank * stride : own;
    for (int64_t i = 0; i < count; i++) source[i] = number(mesh.tp_group.rank, 0, i);
    run(collective(CF_REQUEST_ALLGATHER, source, all, count, stride, blocking));
    for (int r = 0; r < mesh.tp; r++)
        for (int64_t i = 0; i < stride; i++) {
            int64_t right = i < count ? number(r, 0, i) : -1; // gaps stay as they are
            CHECK(all[r * stride + i] == right, "all-gather of %lld every %lld: block %d holds %lld at %lld", (long long)count,
                  (long long)stride, r, (long long)all[r * stride + i], (long long)i);
        }
    free(all);
    free(own);
}

static void reduces(int64_t count, bool blocking) {
    int64_t *blocks = allocate(mesh.tp * count * 8), *own = allocate(count * 8);
    for (int r = 0; r < mesh.tp; r++)
        for (int64_t i = 0; i < count; i++) blocks[r * count + i] = number(mesh.tp_group.rank, r, i);
    run(collective(CF_REQUEST_REDUCE_SCATTER, blocks, own, count, count, blocking));
    for (int64_t i = 0; i < count; i++) {
        int64_t sum = 0;
        for (int r = 0; r < mesh.tp; r++) sum += number(r, mesh.tp_group.rank, i);
        CHECK(own[i] == sum, "reduce-scatter of %lld: %lld at %lld, not %lld", (long long)count, (long long)own[i], (long long)i,
              (long long)sum);
    }
    free(blocks);
    free(own);
}

// Rank j adds in the order j + 1, j + 2, …, j: of these parts every other order that begins elsewhere has another sum.
TEST(sums_in_the_order_of_exchanges) {
    static const float parts[] = {0x1p24f, 1, -0x1p24f, 0.75f};
    const int N = mesh.tp, me = mesh.tp_group.rank;
    for (int turn = 0; turn < 4; turn++)
        for (int blocking = 0; blocking < 2; blocking++) {
            float blocks[4], own, sum = parts[(me + 1 + turn) % N];
            for (int r = 0; r < N; r++) blocks[r] = parts[(me + turn) % N];
            for (int i = 2; i <= N; i++) sum += parts[(me + i + turn) % N];
            cf_request r = collective(CF_REQUEST_REDUCE_SCATTER, blocks, &own, 1, 1, blocking);
            r.dtype = CF_FP32;
            run(r);
            CHECK(own == sum, "%g is the sum, not %g", own, sum);
        }
}

// It takes no memory for blocks and copies nothing: sanitizers check that.
TEST_FIRST(a_first_reduce_scatter_of_nothing) { // before any other
    for (int blocking = 1; blocking >= 0; blocking--) reduces(0, blocking);
}

static void exchanges_all(int64_t count, int64_t stride, bool blocking) {
    int64_t *out = allocate(mesh.tp * stride * 8 + 8), *in = allocate(mesh.tp * stride * 8 + 8);
    for (int r = 0; r < mesh.tp; r++)
        for (int64_t i = 0; i < stride; i++) {
            out[r * stride + i] = i < count ? number(mesh.tp_group.rank, r, i) : -2;
            in[r * stride + i] = -1;
        }
    run(collective(CF_REQUEST_ALLTOALL, out, in, count, stride, blocking));
    for (int r = 0; r < mesh.tp; r++)
        for (int64_t i = 0; i < stride; i++) {
            int64_t right = i < count ? number(r, mesh.tp_group.rank, i) : -1;
            CHECK(in[r * stride + i] == right, "all-to-all of %lld every %lld: block %d holds %lld at %lld", (long long)count,
                  (long long)stride, r, (long long)in[r * stride + i], (long long)i);
        }
    free(out);
    free(in);
}

TEST(native_collectives) {
    static const int64_t counts[] = {0, 1, 7, 1000, 65537};
    for (int blocking = 0; blocking < 2; blocking++)
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
            reduces(counts[i], blocking);
            for (int64_t gap = 0; gap <= 5; gap += 5) {
                gathers(counts[i], counts[i] + gap, blocking, false);
                gathers(counts[i], counts[i] + gap, blocking, true);
                exchanges_all(counts[i], counts[i] + gap, blocking);
            }
        }
}

// Collectives and messages of two groups, all in flight, finished in another order than posted.
TEST(all_at_once) {
    cf_mesh grid = ranks_mesh(transport, mesh.tp / 2, 2);
    int64_t count = 5000, *sums = allocate(2 * count * 8), *sum = allocate(count * 8);
    int64_t *all = allocate(mesh.tp * count * 8), *own = allocate(count * 8);
    unsigned char *out = allocate(count), *in = allocate(count);
    for (int64_t i = 0; i < count; i++) {
        own[i] = number(mesh.tp_group.rank, 0, i);
        for (int r = 0; r < 2; r++) sums[r * count + i] = number(mesh.tp_group.rank, r, i);
    }
    fill(out, ring(0), ring(1), 1, count);
    cf_request reduce = collective(CF_REQUEST_REDUCE_SCATTER, sums, sum, count, count, false);
    reduce.group = &grid.dp_group;
    cf_request gather = collective(CF_REQUEST_ALLGATHER, own, all, count, count, false);
    cf_request message = exchange(ring(1), out, ring(-1), in, count, 1);
    post(&gather);
    post(&reduce);
    post(&message);
    finish(&message);
    finish(&reduce);
    finish(&gather);
    expect(in, ring(-1), ring(0), 1, count);
    for (int64_t i = 0; i < count; i++) {
        const cf_group *dp = &grid.dp_group;
        int64_t right = number(dp->world[0], dp->rank, i) + number(dp->world[1], dp->rank, i);
        CHECK(sum[i] == right, "reduce-scatter over dp: %lld, not %lld", (long long)sum[i], (long long)right);
        for (int r = 0; r < mesh.tp; r++) CHECK(all[r * count + i] == number(r, 0, i), "all-gather: block %d", r);
    }
    free(sums), free(sum), free(all), free(own), free(out), free(in);
    cf_mesh_free(&grid);
}

TEST(requests_can_be_reused) {
    unsigned char out[16] = {0}, in[16];
    cf_request request = exchange(ring(1), out, ring(-1), in, 16, 9);
    for (int i = 0; i < 200; i++) {
        fill(out, ring(0), ring(1), i, 16);
        request.state = 0;
        post(&request);
        finish(&request);
        expect(in, ring(-1), ring(0), i, 16);
    }
}

// Also while a message is in flight whose receiver is not ready.
TEST(ranks_report_to_each_other_at_any_time) {
    enum { COUNT = 1 << 20, REPORTS = 1000 };
    unsigned char *out = allocate(COUNT), *in = allocate(COUNT);
    fill(out, ring(0), ring(1), 3, COUNT);
    const int64_t sent = transport->bytes_sent;
    cf_request send = exchange(ring(1), out, -1, NULL, COUNT, 3), receive = exchange(-1, NULL, ring(-1), in, COUNT, 3);
    post(&send);
    for (int64_t count = 0; count <= REPORTS; count = 10 * count + (count == 0)) {
        double mine[REPORTS], *all = allocate(transport->size * count * (int64_t)sizeof *all);
        for (int64_t i = 0; i < count; i++) mine[i] = (double)(1000 * transport->rank + i);
        cf_allgather_host(transport, mine, all, count * (int64_t)sizeof *mine);
        for (int64_t i = 0; i < transport->size * count; i++)
            CHECK(all[i] == (double)(1000 * (i / count) + i % count), "report %lld of %lld: %g", (long long)i, (long long)count,
                  all[i]);
        free(all);
    }
    post(&receive);
    finish(&receive);
    finish(&send);
    expect(in, ring(-1), ring(0), 3, COUNT);
    CHECK(transport->bytes_sent == sent + COUNT, "reports count as payload");
    double alone = 7, same = 0;
    cf_allgather_host(NULL, &alone, &same, sizeof alone);
    CHECK(same == alone, "a rank alone reports %g", same);
    free(out);
    free(in);
}

// The progress thread polls while something is in flight and must not while nothing is.
TEST(sleeps_when_idle) {
    barrier();
    struct timespec begin, end, pause = {IDLE_MS / 1000, IDLE_MS % 1000 * 1000000};
    nanosleep(&(struct timespec){0, 100000000}, NULL); // what the barrier left to do
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    nanosleep(&pause, NULL);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    double ms = (double)(end.tv_sec - begin.tv_sec) * 1e3 + (double)(end.tv_nsec - begin.tv_nsec) * 1e-6;
    CHECK(ms < IDLE_CPU_MS, "%g ms of processor time in %d ms of idleness", ms, IDLE_MS);
    barrier(); // and wakes up again
}

int main(int argc, char **argv) {
    transport = cf_transport_create("auto", &argc, &argv, TIMEOUT_S);
    stream = cf_stream_create();
    mesh = ranks_mesh(transport, transport->size, 1);
    int status = ranks_run(transport->rank);
    cf_mesh_free(&mesh);
    cf_stream_free(stream);
    transport->close(transport);
    return status;
}
