// See inquiry.h. The walk goes breadth first from this rank along "waits for", so that the way to each rank is a
// shortest one; what it finds is then put into words. Ranks in the same collective operation as this one wait like it
// and are passed over in silence.
#include "inquiry.h"
#include "die.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAMED_MAX = 4, WAY_MAX = 8 }; // ranks told of one by one; ranks of a chain that are listed

typedef struct walk {
    const cf_answer *answers;
    int me, count;
    int *order, *from; // ranks reached; from whom each was, -1: not reached
} walk;

static bool waits(const cf_answer *a) {
    return a->kind == CF_ANSWERED && a->where.waits;
}

// Is the inquiry over at this rank?
static bool is_end(const cf_answer *a) {
    return a->kind == CF_GONE || a->kind == CF_SILENT || (a->kind == CF_ANSWERED && !a->where.waits);
}

static walk walk_from(const cf_answer *answers, int size, int me) {
    walk w = {answers, me, 0, malloc((size_t)size * sizeof(int)), malloc((size_t)size * sizeof(int))};
    if (!w.order || !w.from) cf_die(NULL, "out of memory for an inquiry among %d ranks", size);
    for (int i = 0; i < size; i++) w.from[i] = -1;
    w.order[w.count++] = me;
    w.from[me] = me;
    for (int i = 0; i < w.count; i++) {
        const cf_answer *a = &answers[w.order[i]];
        for (int j = 0; waits(a) && j < (a->where.peer < 0 ? a->where.size : 1); j++) {
            int peer = a->where.peer < 0 ? a->where.first + j * a->where.stride : a->where.peer;
            if (w.from[peer] >= 0) continue;
            w.from[peer] = w.order[i];
            w.order[w.count++] = peer;
        }
    }
    return w;
}

static void end_walk(walk *w) {
    free(w->order);
    free(w->from);
}

int cf_inquiry_next(const cf_answer *answers, int size, int me, int *next) {
    walk w = walk_from(answers, size, me);
    int count = 0;
    for (int i = 0; i < w.count; i++)
        if (answers[w.order[i]].kind == CF_UNASKED) next[count++] = w.order[i];
    end_walk(&w);
    return count;
}

// --- words ---

typedef struct words {
    char *text;
    size_t bytes, length;
} words;

static void add(words *out, const char *format, ...) CF_PRINTF(2, 3);
static void add(words *out, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(out->text + out->length, out->bytes - out->length, format, arguments);
    va_end(arguments);
    out->length += (size_t)length;
    if (out->length >= out->bytes) out->length = out->bytes - 1;
}

static void add_operation(words *out, const cf_whereabouts *at) {
    add(out, "%s", at->label);
    if (at->layer >= 0) add(out, ", layer %d", at->layer);
    if (at->step >= 0) add(out, ", step %d", at->step);
}

static void add_waiting(words *out, const cf_whereabouts *at) {
    if (at->peer >= 0)
        add(out, "it waits for rank %d: ", at->peer);
    else
        add(out, "it waits for the other ranks: ");
    add_operation(out, at);
}

static void add_end(words *out, int rank, const cf_answer *a) {
    if (a->kind == CF_GONE)
        add(out, "rank %d is dead: its process has ended", rank);
    else if (a->kind == CF_SILENT)
        add(out, "rank %d does not answer: frozen, or its host is dead or cut off", rank);
    else {
        add(out, "rank %d answers: it computes, for %.3g s now, ", rank, a->where.since_s);
        if (*a->where.label) {
            add(out, "after ");
            add_operation(out, &a->where);
        } else
            add(out, "and has not begun any operation");
        add(out, ": it is slow, or stuck there");
    }
}

// The ranks between this one and the end of a chain.
static void add_way(words *out, const walk *w, int rank) {
    int way[WAY_MAX] = {0}, length = 0, at = 0;
    for (int r = rank; r != w->me; r = w->from[r]) length++;
    for (int r = rank, i = length; r != w->me; r = w->from[r])
        if (--i < WAY_MAX) way[i] = r;
    add(out, "; the chain of ranks ");
    for (; at < length && at < WAY_MAX; at++) add(out, at ? ", %d" : "%d", way[at]);
    if (length > WAY_MAX) add(out, ", … %d", rank);
}

static bool same_operation(const cf_whereabouts *a, const cf_whereabouts *b) {
    return a->layer == b->layer && a->step == b->step && strcmp(a->label, b->label) == 0;
}

static bool side_by_side(const cf_whereabouts *a, const cf_whereabouts *b) {
    return a->peer < 0 && b->peer < 0 && a->group == b->group && same_operation(a, b);
}

// --- the two cases ---

// Ranks at which the walk ends; returns the worst kind, or CF_UNASKED if there is none.
static cf_answer_kind add_ends(words *out, const walk *w) {
    cf_answer_kind worst = CF_UNASKED;
    int count = 0;
    for (int i = 1; i < w->count; i++) {
        int rank = w->order[i];
        const cf_answer *a = &w->answers[rank];
        if (!is_end(a)) continue;
        if (a->kind > worst) worst = a->kind;
        if (++count > NAMED_MAX) continue;
        bool direct = w->from[rank] == w->me;
        if (!direct) add_way(out, w, rank);
        add(out, direct ? "; " : " ends there: ");
        add_end(out, rank, a);
        if (!direct) add(out, ": look at rank %d", rank);
    }
    if (count > NAMED_MAX) add(out, "; and %d more", count - NAMED_MAX);
    return worst;
}

// How far a peer of this rank is from it in the group in which they should meet.
static void add_distance(words *out, const cf_whereabouts *mine, const cf_whereabouts *at) {
    long long ahead = (long long)(at->posted[mine->group] - mine->posted[mine->group]);
    if (ahead != 0)
        add(out, " (%lld request%s %s in that group)", llabs(ahead), llabs(ahead) == 1 ? "" : "s",
            ahead > 0 ? "ahead" : "behind");
}

// Ranks that this one waits for and that wait themselves, for something else.
static int add_peers(words *out, const walk *w, bool circle) {
    const cf_whereabouts *mine = &w->answers[w->me].where;
    int count = 0;
    for (int i = 1; i < w->count; i++) {
        int rank = w->order[i];
        const cf_answer *a = &w->answers[rank];
        if (w->from[rank] != w->me || !waits(a) || side_by_side(mine, &a->where)) continue;
        if (++count > NAMED_MAX) continue;
        add(out, "; rank %d answers: ", rank);
        add_waiting(out, &a->where);
        if (circle && !same_operation(mine, &a->where)) add_distance(out, mine, &a->where);
    }
    if (count > NAMED_MAX) add(out, "; and %d more wait elsewhere", count - NAMED_MAX);
    return count;
}

// All wait for each other. True: not in the same operation.
static bool add_circle(words *out, const walk *w) {
    const cf_whereabouts *mine = &w->answers[w->me].where;
    for (int i = 1; i < w->count; i++) {
        int rank = w->order[i];
        const cf_answer *a = &w->answers[rank];
        if (!waits(a) || same_operation(mine, &a->where)) continue;
        if (w->from[rank] != w->me) {
            add_way(out, w, rank);
            add(out, " goes on: rank %d answers: ", rank);
            add_waiting(out, &a->where);
        }
        add(out, ": the ranks are not at the same operation (desynchronised)");
        return true;
    }
    if (w->count > 1) add(out, "; they wait for each other in the same operation: messages are lost or late");
    return false;
}

const char *cf_inquiry_verdict(const cf_answer *answers, int size, int me, char *text, size_t bytes) {
    words out = {text, bytes, 0};
    walk w = walk_from(answers, size, me);
    bool circle = true;
    for (int i = 1; i < w.count; i++) circle &= waits(&answers[w.order[i]]);
    *text = 0;
    add_peers(&out, &w, circle);
    cf_answer_kind worst = add_ends(&out, &w);
    bool apart = circle && add_circle(&out, &w);
    end_walk(&w);
    if (worst == CF_GONE)
        return "see that rank's last words, and its host's log: was it killed, out of memory?";
    if (worst == CF_SILENT) return "look at that process and its host: stopped, swapping, off the network?";
    if (worst == CF_ANSWERED)
        return "look at what that rank does and at its host's load, or allow more time with --timeout";
    if (apart) return "all ranks need the same program, options and data; if they have, the program is wrong";
    return "look at the network between these ranks, or allow more time with --timeout";
}
