// ranks: 1
//
// Records made by hand, with times that can be worked out on paper.
#include <string.h>
#include <math.h>
#include "commfuse/predict/playback.h"
#include "tests/death.h"

static void assert_near(double found, double expected) {
    if (!(fabs(found - expected) < 1e-6)) fail_msg("%.9g is not %.9g", found, expected);
}

static const cf_hardware gpu = {.gpu = true, .multiprocessors = 4, .links = 1}, cpu = {.multiprocessors = 1, .links = 1},
                         slow_host = {.gpu = true, .multiprocessors = 4, .links = 1, .call_s = 2e-3},
                         late = {.gpu = true, .multiprocessors = 4, .links = 1, .start_s = 1.5e-3};

static void kernel(cf_record *r, double ms) {
    cf_record_entry *e = cf_record_add(r, CF_DO_KERNEL);
    e->name = "kernel", e->ms = ms;
}

// Each block takes one multiprocessor.
static void blocks(cf_record *r, int64_t count, double ms) {
    kernel(r, ms);
    r->entry[r->entries - 1].blocks[0] = count, r->entry[r->entries - 1].block_ms[0] = ms;
}

static cf_record_unit *post(cf_record *r, int queue, int to, int from, double wire_ms) {
    cf_record_unit *u = cf_record_add_unit(r, queue == 0 ? "urgent" : "bulk", queue);
    u->sends_to = UINT64_C(1) << to, u->receives_from = UINT64_C(1) << from;
    u->wire_ms[0] = wire_ms, u->latency_ms = 1, u->bulk = queue > 0;
    cf_record_add(r, CF_DO_POST)->unit = (int)r->units - 1;
    return u;
}

static void await(cf_record *r, int unit) {
    cf_record_add(r, CF_DO_WAIT_COMPLETE)->unit = unit;
}

static cf_played play(cf_record *a, cf_record *b) {
    const cf_record *both[] = {a, b};
    cf_record_add(a, CF_DO_STEP);
    if (b) cf_record_add(b, CF_DO_STEP);
    cf_played p = cf_playback(both, b ? 2 : 1, NULL);
    cf_record_free(a);
    if (b) cf_record_free(b);
    return p;
}

static cf_record begin(const cf_hardware *hardware) {
    cf_record r = {.hardware = hardware};
    cf_record_add(&r, CF_DO_STEP);
    return r;
}

// 10 ms of transfer and 1 of latency during a kernel of 8: 3 are exposed.
TEST(a_kernel_hides_a_transfer) {
    cf_record r = begin(&gpu);
    post(&r, 0, 0, 0, 10);
    kernel(&r, 8);
    await(&r, 0);
    cf_played p = play(&r, NULL);
    assert_near(p.step_ms, 11);
    assert_near(p.part_ms[CF_PART_EXPOSED], 3);
    assert_string_equal(p.exposed.total[0].name, "urgent");
}

TEST(taken_multiprocessors_slow_kernels) {
    cf_record r = begin(&gpu);
    post(&r, 0, 0, 0, 9)->taken = 0.5;
    kernel(&r, 8);
    await(&r, 0);
    cf_played p = play(&r, NULL);
    assert_near(p.step_ms, 13); // 10 ms at half speed, then 3 ms
    assert_near(p.part_ms[CF_PART_SLOWED], 5);
}

// A transfer takes two of four multiprocessors for 10 ms and 1 ms of latency. Meanwhile work for the whole device takes twice its
// 1 ms, and of four blocks of 8 ms two begin then and two when those have ended. A transfer that starts half a millisecond too late
// finds no free multiprocessor and waits until the blocks have ended.
TEST(blocks_and_transfers_wait_for_each_other) {
    for (int asks_late = 0; asks_late < 2; asks_late++) {
        cf_record r = begin(asks_late ? &late : &gpu);
        post(&r, 0, 0, 0, 10)->taken = 0.5;
        kernel(&r, 1);
        blocks(&r, 4, 8);
        await(&r, 0);
        cf_played p = play(&r, NULL);
        assert_near(p.step_ms, asks_late ? 1 + 8 + 11 : 2 + 8 + 8);
        assert_near(p.part_ms[CF_PART_SLOWED], asks_late ? 0 : 1 + 8);
    }
}

// Six blocks on four multiprocessors: two waves.
TEST(blocks_come_in_waves) {
    cf_record r = begin(&gpu);
    blocks(&r, 6, 3);
    assert_near(play(&r, NULL).step_ms, 6);
}

// The second stream's blocks run during the last wave of the first stream's, but after its first; each kernel counts in full.
TEST(two_streams_fill_the_waves) {
    cf_record r = begin(&gpu);
    blocks(&r, 6, 3);
    blocks(&r, 2, 3);
    r.entry[r.entries - 1].stream = 1;
    const int64_t both = r.entries;
    cf_record_add(&r, CF_DO_AFTER)->after = both;
    kernel(&r, 1);
    cf_played p = play(&r, NULL);
    assert_near(p.step_ms, 6 + 1);
    assert_near(p.part_ms[CF_WORK_PRODUCT] + p.part_ms[CF_PART_SLOWED], 6 + 1);
}

// On a GPU two queues share a link; on a CPU bulk gives way.
TEST(lanes_share_a_link) {
    for (int on_cpu = 0; on_cpu < 2; on_cpu++) {
        cf_record r = begin(on_cpu ? &cpu : &gpu);
        post(&r, 1, 0, 0, 10);
        post(&r, 0, 0, 0, 4);
        await(&r, 1);
        cf_record_add(&r, CF_DO_STEP);
        await(&r, 0);
        cf_played p = play(&r, NULL);
        assert_near(p.step_ms, on_cpu ? 15 - 5 : 15 - 9);
    }
}

// Rank 1 can send only when rank 0, which computes, has posted its receive: on GPUs and on CPUs.
TEST(a_transfer_waits_for_its_receiver) {
    cf_record a = begin(&gpu), b = begin(&gpu);
    kernel(&a, 20);
    post(&a, 0, 1, 1, 5), post(&b, 0, 0, 0, 5);
    await(&a, 0), await(&b, 0);
    cf_played p = play(&a, &b);
    assert_near(p.step_ms, 26);
    assert_near(p.part_ms[CF_PART_EXPOSED], 26); // rank 1's
}

TEST(what_a_unit_waits_for_comes_first) {
    cf_record r = begin(&gpu);
    post(&r, 0, 0, 0, 5);
    post(&r, 2, 0, 0, 5)->after[0] = 0;
    await(&r, 1);
    assert_near(play(&r, NULL).step_ms, 12);
}

// Kernels of 1 ms, of which the host starts one every 2 ms.
TEST(a_slow_host_is_the_bound) {
    cf_record r = begin(&slow_host);
    for (int i = 0; i < 10; i++) kernel(&r, 1);
    cf_played p = play(&r, NULL);
    assert_near(p.step_ms, 21);
    assert_near(p.part_ms[CF_PART_HOST], 11);
}

// Each rank waits for the second unit before it posts its half.
static void early_waits(void) {
    cf_record a = begin(&gpu), b = begin(&gpu);
    post(&a, 0, 1, 1, 1), await(&a, 1), post(&a, 2, 1, 1, 1);
    post(&b, 0, 0, 0, 1), await(&b, 1), post(&b, 2, 0, 0, 1);
    play(&a, &b);
}

// In one queue each rank waits for a unit that the other posts after its own wait.
static void crossed_waits(void) {
    cf_record a = begin(&gpu), b = begin(&gpu);
    post(&a, 0, 1, 1, 1), await(&a, 0), post(&a, 2, 1, 1, 1), await(&a, 1);
    post(&b, 2, 0, 0, 1), await(&b, 0), post(&b, 0, 0, 0, 1), await(&b, 1);
    play(&a, &b);
}

static void unequal_lanes(void) {
    cf_record a = begin(&gpu), b = begin(&gpu);
    post(&a, 0, 1, 1, 1);
    play(&a, &b);
}

TEST(a_deadlock_is_reported_as_such) {
    ASSERT_DIES(early_waits(), "deadlock: rank 0 waits for ever for bulk");
    ASSERT_DIES(crossed_waits(), "ranks 0 and 1 post different units");
    ASSERT_DIES(unequal_lanes(), "ranks 0 and 1 post different units");
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
