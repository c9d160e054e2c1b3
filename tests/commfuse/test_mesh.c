// ranks: 1
//
// Meshes: every tp × dp of at most 64 ranks, seen from every rank.
#include "tests/death.h"
#include "commfuse/base/die.h"
#include "commfuse/mesh.h"

enum { RANKS_MAX = 64 };

static void check_group(const cf_group *group, const char *name, int size, int rank, int world_rank) {
    assert_string_equal(group->name, name);
    assert_int_equal(group->size, size);
    assert_int_equal(group->rank, rank);
    assert_int_equal(group->world[rank], world_rank);
}

// Every rank of every mesh: its place in each of its groups, and who else is in them.
TEST(every_mesh) {
    for (int tp = 1; tp <= RANKS_MAX; tp++)
        for (int dp = 1; tp * dp <= RANKS_MAX; dp++)
            for (int world = 0; world < tp * dp; world++) {
                cf_mesh mesh;
                cf_mesh_init(&mesh, tp * dp, world, tp, dp);
                assert_int_equal(mesh.tp, tp);
                assert_int_equal(mesh.dp, dp);
                check_group(&mesh.tp_group, "tp", tp, world % tp, world);
                check_group(&mesh.dp_group, "dp", dp, world / tp, world);
                check_group(&mesh.world_group, "world", tp * dp, world, world);
                for (int i = 0; i < tp; i++) assert_int_equal(mesh.tp_group.world[i], world / tp * tp + i);
                for (int i = 0; i < dp; i++) assert_int_equal(mesh.dp_group.world[i], i * tp + world % tp);
                for (int i = 0; i < tp * dp; i++) assert_int_equal(mesh.world_group.world[i], i);
                cf_mesh_free(&mesh);
            }
}

// Each rank is in exactly one tp and one dp group, its members agree on the list, and a tp and a dp group
// have one rank in common at most.
TEST(groups_partition_the_world) {
    int tp = 6, dp = 5, together[30][30][2] = {{{0}}};
    cf_mesh mesh[30];
    for (int r = 0; r < tp * dp; r++) cf_mesh_init(&mesh[r], tp * dp, r, tp, dp);
    for (int r = 0; r < tp * dp; r++) {
        const cf_group *groups[2] = {&mesh[r].tp_group, &mesh[r].dp_group};
        for (int g = 0; g < 2; g++)
            for (int i = 0; i < groups[g]->size; i++) together[r][groups[g]->world[i]][g]++;
    }
    for (int a = 0; a < tp * dp; a++)
        for (int b = 0; b < tp * dp; b++) {
            for (int g = 0; g < 2; g++) {
                assert_in_range(together[a][b][g], 0, 1);
                assert_int_equal(together[a][b][g], together[b][a][g]);
                assert_true(a != b || together[a][b][g] == 1);
            }
            assert_true(a == b || together[a][b][0] + together[a][b][1] <= 1);
        }
    for (int r = 0; r < tp * dp; r++) cf_mesh_free(&mesh[r]);
}

// By the definition: the number of hosts if each has as many neighbouring members; 1: not, or they are on one.
static int even_hosts(const cf_group *group, int ranks_per_host) {
    int on[RANKS_MAX] = {0}, hosts = 0;
    for (int i = 0; i < group->size; i++) hosts += on[group->world[i] / ranks_per_host]++ == 0;
    for (int i = 0; i < group->size; i++)
        if (on[group->world[i] / ranks_per_host] * hosts != group->size) return 1;
    return hosts;
}

// All groups of one name have the same, and 1 unless all are even. (As many hosts as members are one level, like 1.)
TEST(groups_know_their_hosts) {
    for (int tp = 1; tp <= 24; tp++)
        for (int dp = 1; tp * dp <= RANKS_MAX; dp++)
            for (int per_host = 0; per_host <= tp * dp; per_host++) {
                int least[3] = {RANKS_MAX, RANKS_MAX, RANKS_MAX}, most[3] = {0}, found[3] = {0};
                for (int world = 0; world < tp * dp; world++) {
                    cf_mesh mesh;
                    cf_mesh_init(&mesh, tp * dp, world, tp, dp);
                    cf_mesh_set_hosts(&mesh, per_host);
                    const cf_group *group[] = {&mesh.tp_group, &mesh.dp_group, &mesh.world_group};
                    for (int g = 0; g < 3; g++) {
                        const int hosts = per_host > 0 ? even_hosts(group[g], per_host) : 1;
                        if (hosts < least[g]) least[g] = hosts;
                        if (hosts > most[g]) most[g] = hosts;
                        assert_true(world == 0 || group[g]->hosts == found[g]);
                        found[g] = group[g]->hosts;
                    }
                    cf_mesh_free(&mesh);
                }
                const int size[] = {tp, dp, tp * dp};
                for (int g = 0; g < 3; g++)
                    assert_true(found[g] == (least[g] == most[g] ? most[g] : 1) || (found[g] == 1 && most[g] == size[g]));
            }
}

// A group of the caller's may be in any order.
TEST(hosts_of_any_group) {
    int in_order[] = {0, 1, 4, 5, 8, 9}, uneven[] = {0, 1, 4, 5, 6, 8}, scattered[] = {0, 4, 1, 5}, again[] = {0, 1, 4, 5, 2, 3};
    assert_int_equal(cf_group_hosts(&(cf_group){.size = 6, .world = in_order}, 4), 3);
    assert_int_equal(cf_group_hosts(&(cf_group){.size = 6, .world = uneven}, 4), 1);
    assert_int_equal(cf_group_hosts(&(cf_group){.size = 4, .world = scattered}, 4), 1);
    assert_int_equal(cf_group_hosts(&(cf_group){.size = 6, .world = again}, 4), 1);
    assert_int_equal(cf_group_hosts(&(cf_group){.size = 6, .world = in_order}, 0), 1);
}

TEST(wrong_products_die) {
    static const int wrong[][3] = {{8, 3, 2}, {8, 8, 2},   {8, 1, 1},   {1, 2, 1}, {8, 0, 8},
                                   {8, 8, 0}, {8, -2, -4}, {8, -8, -1}, {0, 0, 1}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        cf_mesh mesh;
        char ranks[16];
        snprintf(ranks, sizeof ranks, "%d", wrong[i][0]);
        ASSERT_DIES(cf_mesh_init(&mesh, wrong[i][0], 0, wrong[i][1], wrong[i][2]), "tp", "dp", ranks);
    }
    cf_mesh mesh; // 65536 · 65536 ranks are not 0 ranks
    ASSERT_DIES(cf_mesh_init(&mesh, 0, 0, 65536, 65536), "tp", "dp");
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
