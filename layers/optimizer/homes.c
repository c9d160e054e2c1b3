// See homes.h.
#include "zero.h"

enum { SECTIONS = 3 }; // most matrices of a tensor

// --- life ---

static double flops_of(const gpt_shape *s, int tensor) {
    double flops = 0;
    for (int i = 0; i < SECTIONS; i++) {
        const double n = (double)(params_section_rows(s, tensor, i) * params_columns(s, tensor)),
                     m = fmin((double)params_section_rows(s, tensor, i), (double)params_columns(s, tensor));
        flops += ITERATIONS * m * (4 * n + 2 * m * m);
    }
    return flops;
}

// The runs of all ranks' shards; those that are rows of a block are one piece.
static void find_pieces(homes *h, const parameters *p, const param_bucket *b) {
    const int64_t columns = params_columns(&p->shape, b->tensor), splits = h->world->size / b->group->size;
    int64_t room = 1, count = 0;
    home_piece *all = cf_host_alloc(room, sizeof *all, "homes"), *last = NULL;
    for (int64_t rank = 0; rank < h->world->size; rank++)
        for (int64_t run = 0; run < params_runs(p, b->tensor); run++) {
            const param_run r = params_run(p, b->tensor, (int)(rank % splits), run);
            const int64_t shard = rank / splits * b->shard, from = larger(r.local, shard),
                          width = smaller(r.local + r.count, shard + b->shard) - from;
            const home_piece next = {rank, r.whole + from - r.local, from - shard, 1, width};
            if (width <= 0) continue;
            if (last && last->rank == rank && last->columns == width && last->whole + last->rows * columns == next.whole) {
                last->rows++; // shards have no gaps
                continue;
            }
            all = cf_host_grow(all, &room, count + 1, sizeof *all, "homes");
            last = &all[count++], *last = next;
        }
    h->piece[b->tensor] = all, h->pieces[b->tensor] = count;
}

// The next home is the rank with the fewest flops so far of those that are none in this round. It has a tensor of as many layers as
// let every rank have as many.
static void choose_homes(homes *h, const parameters *p) {
    const int64_t L = p->shape.L, N = h->world->size;
    int64_t *last = cf_host_alloc(N, sizeof *last, "homes"), chosen = 0; // 1 + the last round of which a rank is a home
    home_matrix *m = h->matrix;
    for (int64_t first = 0, count = 1; first < L; first += N * count) {
        count = larger(1, smaller(orthogonalise_layers(), (L - first) / N));
        for (int tensor = 0; tensor < TENSORS; tensor++)
            for (int64_t l = first; l < smaller(first + N * count, L) && l < params_layers(&p->shape, tensor); l += count) {
                const param_bucket *b = &p->bucket[params_find(p, tensor, l)->bucket];
                const int64_t shard = params_aligned(b->shard);
                home_round *r = &h->round[chosen / N];
                int best = -1;
                if (b->kind != BUCKET_MATRIX) continue;
                if (l == 0) find_pieces(h, p, b);
                if (chosen++ % N == 0) r->first = m, h->rounds++;
                for (int rank = 0; rank < N; rank++)
                    if (last[rank] < h->rounds && (best < 0 || h->flops[rank] < h->flops[best])) best = rank;
                last[best] = h->rounds, h->flops[best] += (double)count * flops_of(&p->shape, tensor);
                if (best == h->world->rank) r->mine = m, r->count = count;
                for (int64_t i = 0; i < count; i++)
                    *m++ = (home_matrix){&p->bucket[params_find(p, tensor, l + i)->bucket], best, i * shard};
                r->end = m, r->slice = larger(r->slice, count * shard);
            }
    }
    free(last);
}

homes *homes_create(const zero_shards *z, const overlap *how) {
    const parameters *p = z->params;
    homes *h = cf_host_alloc(1, sizeof *h, "homes");
    int64_t slice = 0;
    h->world = p->bucket[p->buckets - 1].group; // that of vectors
    h->matrix = cf_host_alloc(p->buckets, sizeof *h->matrix, "homes");
    h->round = cf_host_alloc(p->buckets, sizeof *h->round, "homes");
    h->flops = cf_host_alloc(h->world->size, sizeof *h->flops, "homes");
    choose_homes(h, p);
    for (int64_t k = 0; k < h->rounds; k++) slice = larger(slice, h->round[k].slice);
    cf_fuse_config config = overlap_config(how, "matrices home", h->world, CF_ALLTOALL, CF_NO_COMPUTE, REAL_DTYPE, slice);
    config.urgency = CF_BULK;
    h->there = cf_fuse_create(z->context, config);
    config.name = "matrices back";
    h->back = cf_fuse_create(z->context, config);
    const int64_t all = h->world->size * slice, bytes = all * (int64_t)sizeof(real); // no home's matrices are larger
    h->leaving = cf_alloc(bytes, "matrices sent"), h->returning = cf_alloc(bytes, "matrices sent");
    h->x = cf_alloc(bytes, "matrices at home");
    h->scratch = cf_alloc((ORTHOGONALISE_SCRATCH + 4 * all) * (int64_t)sizeof(accum), "matrices at home");
    h->sent = h->done = h->updated = h->rounds;
    return h;
}

void homes_free(homes *h) {
    if (!h) return;
    cf_fuse_free(h->there), cf_fuse_free(h->back);
    cf_free(h->leaving), cf_free(h->returning), cf_free(h->x), cf_free(h->scratch);
    for (int tensor = 0; tensor < TENSORS; tensor++) free(h->piece[tensor]);
    free(h->matrix), free(h->round), free(h->flops), free(h);
}

// --- an update ---

// Elements of this rank's shard that are not padding.
static int64_t owned(const param_bucket *b) {
    return smaller(b->shard, b->first + b->used - params_first_owned(b));
}

static void send(zero_shards *z) {
    homes *h = z->homes;
    const home_round *r = &h->round[h->sent++];
    const cf_trace_work work = cf_trace_begin(z->context->trace, "momentum", r->first->bucket->layer, z->context->stream);
    for (const home_matrix *m = r->first; m < r->end; m++) {
        zero_bucket *s = &z->bucket[m->bucket - z->params->bucket];
        if (owned(m->bucket) > 0)
            nesterov_momentum(h->leaving + m->home * r->slice + m->at, z->state[0] + m->bucket->owned_before, s->reduced,
                              owned(m->bucket), z->update, z->context->stream);
        s->reduced = NULL;
    }
    cf_trace_end(z->context->trace, work, -1, z->context->stream);
    cf_fuse_begin(h->there, h->leaving, r->slice, 1, NULL, NULL, r->first->bucket->layer);
}

// Those of one shape at once; of several layers, if all sections are alike.
static void orthogonalise_mine(const homes *h, const home_round *r, const gpt_shape *s, cf_stream *stream) {
    const int tensor = r->mine->bucket->tensor;
    const int64_t columns = params_columns(s, tensor);
    real *x = h->x;
    int alike = 0;
    while (params_section_rows(s, tensor, alike) == params_section_rows(s, tensor, 0)) alike++;
    const int64_t layers = params_section_rows(s, tensor, alike) == 0 ? r->count : 1;
    for (int64_t l = 0; l < r->count; l += layers)
        for (int first = 0, end = 0; params_section_rows(s, tensor, first) > 0; first = end) {
            const int64_t rows = params_section_rows(s, tensor, first);
            while (params_section_rows(s, tensor, end) == rows) end++;
            orthogonalise(x, layers * (end - first), rows, columns, h->scratch, stream);
            x += layers * (end - first) * rows * columns;
        }
}

// Between the slices of all ranks and x, where this rank's matrices are whole.
static void place_mine(const homes *h, const home_round *r, const gpt_shape *s, real *slices, bool home, cf_stream *stream) {
    for (int64_t j = 0; j < r->count; j++) {
        const int tensor = r->mine->bucket->tensor;
        const int64_t columns = params_columns(s, tensor), n = params_rows(s, tensor) * columns;
        for (const home_piece *i = h->piece[tensor]; i < h->piece[tensor] + h->pieces[tensor]; i++) {
            real *whole = h->x + j * n + i->whole, *part = slices + i->rank * r->slice + r->mine[j].at + i->at;
            copy_block(home ? whole : part, home ? columns : i->columns, home ? part : whole, home ? i->columns : columns, i->rows,
                       i->columns, stream);
        }
    }
}

static void update_owned(zero_shards *z) {
    homes *h = z->homes;
    const parameters *p = z->params;
    const home_round *r = &h->round[h->updated++];
    const real *x = cf_fuse_finish(h->back);
    const cf_trace_work work = cf_trace_begin(z->context->trace, "update", r->first->bucket->layer, z->context->stream);
    for (const home_matrix *m = r->first; m < r->end; m++) {
        const param_bucket *b = m->bucket;
        zero_bucket *s = &z->bucket[b - p->bucket];
        const int64_t longer = larger(params_section_rows(&p->shape, b->tensor, 0), params_columns(&p->shape, b->tensor));
        if (owned(b) > 0)
            orthogonal_update(p->weight + params_first_owned(b), z->master ? z->master + b->owned_before : NULL,
                              x + m->home * r->slice + m->at, owned(b), 1 - z->update.lr * z->update.weight_decay,
                              -0.2 * z->update.lr * sqrt((double)longer), z->context->stream);
        s->weights = s->gather ? WEIGHTS_UPDATED : WEIGHTS_HERE;
    }
    cf_trace_end(z->context->trace, work, -1, z->context->stream);
}

void homes_begin(zero_shards *z) {
    homes *h = z->homes;
    h->ms = 0;
    for (const home_round *r = h->round; r < h->round + h->rounds; r++)
        if (h->timed && cf_event_remembered(r->began)) h->ms += cf_event_ms(r->ended) - cf_event_ms(r->began);
    h->sent = h->done = h->updated = 0, h->timed = true;
    send(z);
}

bool homes_continue(zero_shards *z) {
    homes *h = z->homes;
    if (!h || h->done == h->rounds) return false;
    cf_stream *stream = z->context->stream;
    home_round *r = &h->round[h->done++];
    const gpt_shape *shape = &z->params->shape;
    place_mine(h, r, shape, cf_fuse_finish(h->there), true, stream);
    if (h->sent < h->rounds) send(z);
    const cf_trace_work work = cf_trace_begin(z->context->trace, "orthogonalise", r->first->bucket->layer, stream);
    r->began = cf_event_record(stream);
    if (r->mine) orthogonalise_mine(h, r, shape, stream);
    r->ended = cf_event_record(stream);
    cf_trace_end(z->context->trace, work, -1, stream);
    if (h->updated < h->done - 1) update_owned(z);
    place_mine(h, r, shape, h->returning, false, stream);
    cf_fuse_begin(h->back, h->returning, r->slice, 1, NULL, NULL, r->first->bucket->layer);
    return true;
}

void homes_finish(zero_shards *z) {
    if (z->homes && z->homes->updated < z->homes->done) update_owned(z);
}

// --- for --dry-run ---

void homes_operations(const homes *h, visit_operation *visit, void *argument) {
    if (h) visit(argument, "matrices to their homes", h->there, h->rounds), visit(argument, "orthogonalised", h->back, h->rounds);
}

void homes_explain(const homes *h, FILE *out) {
    if (!h) return;
    double most = 0, least = INFINITY, moved = 0;
    fprintf(out, "Homes of the matrices, and what a rank sends to each, and gets back\n");
    for (int64_t k = 0; k < h->rounds; k++) {
        const double mib = (double)(h->round[k].slice * (int64_t)sizeof(real)) / 1048576;
        fprintf(out, "  round %-3ld %8.3f MiB ", k, mib);
        for (const home_matrix *m = h->round[k].first; m < h->round[k].end; m++)
            fprintf(out, "  rank %d: layer %d %s", m->home, m->bucket->layer, params_name(m->bucket->tensor));
        fprintf(out, "\n"), moved += (h->world->size - 1) * mib;
    }
    for (int rank = 0; rank < h->world->size; rank++) most = fmax(most, h->flops[rank]), least = fmin(least, h->flops[rank]);
    fprintf(out, "  in all %8.2f MiB each way; products of %.3g to %.3g GFLOP a rank\n", moved, least * 1e-9, most * 1e-9);
}
