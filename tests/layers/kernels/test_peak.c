// ranks: 1
//
// The peak is the machine's, however many ranks share its cores. Products and clocks are imagined, so nothing depends on
// what else this machine does: a product takes 8 or 10 ms of a core in turn, and longer by the clock where ranks take
// turns.
#include "tests/death.h"
#include <math.h>
#include <time.h>
#include "layers/kernels/gemm.h"
#include "layers/kernels/peak.h"

static double used_ms, turns; // processor time; ranks for each core, at least 1
static int readings;

static void imagine_product(int64_t n, const real *a, const real *b, const real *c, const cf_stream *stream) {
    assert_true(n > 0 && a && b && c && stream);
    used_ms += readings++ % 2 ? 10 : 8;
}

static double imagined_now(void) {
    return used_ms * turns;
}

static int imagined_time(struct timespec *t) {
    *t = (struct timespec){.tv_sec = (time_t)(used_ms * 1e-3), .tv_nsec = (long)(fmod(used_ms, 1e3) * 1e6)};
    return 0;
}

#define cf_now_ms                                             imagined_now
#define clock_gettime(id, t)                                  imagined_time(t)
#define gemm_pack(packed, tb, n, k, b, ldb)                   assert_non_null(packed)
#define gemm_packed(m, n, k, a, packed, bias, add, c, stream) imagine_product(n, a, packed, c, stream)
#include "layers/kernels/peak.c"

enum { RANKS_MAX = 16, CORES_MAX = 8 };
static int meetings, ranks;
static bool last_disturbed;

// As if all ranks gave the same; but the last one may have had other work, which is said at the end.
static void gather(cf_transport *transport, const void *mine, void *all, int64_t bytes) {
    meetings++;
    for (int i = 0; i < transport->size; i++) memcpy((char *)all + i * bytes, mine, (size_t)bytes);
    if (last_disturbed && meetings == 2 * SHAPES + 1) ((double *)all)[transport->size - 1] = 1;
}

TEST(peak_does_not_depend_on_the_ranks) {
    const char *source = NULL;
    cf_stream *stream = cf_stream_create();
    for (int cores = 1; cores <= CORES_MAX; cores++)
        for (ranks = cores; ranks <= RANKS_MAX; ranks++) {
            used_ms = readings = meetings = 0;
            turns = (double)ranks / cores;
            cf_transport transport = {.size = ranks, .gather = gather};
            double found = peak_flops(false, &source, (double)cores / ranks, &transport, stream);
            double expected = cores * 2.0 * LARGEST * LARGEST * LARGEST / 9e-3;
            if (fabs(found / expected - 1) > 0.03)
                fail_msg("%d ranks on %d cores: %.3f of their peak", ranks, cores, found / expected);
            assert_int_equal(meetings, 2 * SHAPES + 1); // before each shape all wait for each other
            assert_string_equal(source, "all cores, best of matrix products of 512, 1024 and 1536 cubed on each");
            last_disturbed = true, meetings = 0;
            peak_flops(false, &source, (double)cores / ranks, &transport, stream);
            assert_non_null(strstr(source, "; other work took them meanwhile, so it may be too low"));
            last_disturbed = false;
            turns *= 1.3; // with other work
            peak_flops(false, &source, (double)cores / ranks, &transport, stream);
            assert_non_null(strstr(source, "; other work took them meanwhile, so it may be too low"));
        }
    cf_stream_free(stream);
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
