// ranks: 1
// Philox against the published known answers (Random123, kat_vectors), and the moments of the distributions made from it.
#include "kernels/kernel_testing.h"

typedef struct answer {
    uint32_t counter[4], key[2], bits[4];
} answer;

TEST(philox_known_answers) {
    static const answer known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const answer *a = &known[i];
        uint32_t bits[4];
        random_bits((uint64_t)a->key[1] << 32 | a->key[0], (uint64_t)a->counter[3] << 32 | a->counter[2],
                    (uint64_t)a->counter[1] << 32 | a->counter[0], bits);
        assert_memory_equal(bits, a->bits, sizeof bits);
    }
}

enum { DRAWS = 200000 };

// Mean of f(x)ᵏ is within five standard errors of what the distribution has.
static void assert_moment(double (*draw)(uint64_t, uint64_t, uint64_t), int power, double expected, double variance) {
    double sum = 0;
    for (uint64_t i = 0; i < DRAWS; i++) sum += pow(draw(5, 7, i), power);
    double error = sum / DRAWS - expected;
    if (fabs(error) > 5 * sqrt(variance / DRAWS)) fail_msg("moment %d is %g, expected %g", power, expected + error, expected);
}

TEST(uniform_moments_and_range) {
    for (int k = 1; k <= 4; k++) {
        double mean = 1.0 / (k + 1), square = 1.0 / (2 * k + 1);
        assert_moment(random_uniform, k, mean, square - mean * mean);
    }
    double low = 1, high = 0;
    for (uint64_t i = 0; i < DRAWS; i++) low = fmin(low, random_uniform(5, 7, i)), high = fmax(high, random_uniform(5, 7, i));
    assert_true(low >= 0 && low < 1e-3 && high < 1 && high > 1 - 1e-3);
}

TEST(normal_moments) {
    assert_moment(random_normal, 1, 0, 1);
    assert_moment(random_normal, 2, 1, 2);
    assert_moment(random_normal, 3, 0, 15);
    assert_moment(random_normal, 4, 3, 96);
    assert_moment(random_normal, 6, 15, 10395 - 225);
}

// Another seed, stream or neighbour gives numbers that have nothing to do with these.
TEST(neighbours_are_independent) {
    const uint64_t other[][3] = {{6, 7, 0}, {5, 8, 0}, {5, 7, 1}, {5, 7 | 1ull << 40, 0}, {5 | 1ull << 40, 7, 0}};
    for (size_t j = 0; j < sizeof other / sizeof *other; j++) {
        double sum = 0;
        for (uint64_t i = 0; i < DRAWS; i++)
            sum += random_normal(5, 7, i) * random_normal(other[j][0], other[j][1], i + other[j][2]);
        assert_true(fabs(sum / DRAWS) < 5 / sqrt(DRAWS));
    }
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
