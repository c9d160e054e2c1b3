// Why does nothing come? What a rank concludes from where the others say they are. Pure: watch.h asks them.
//
// Who waits in vain often waits for a rank that itself waits: a ring passes a standstill on from neighbour to
// neighbour. So the inquiry follows from rank to rank what each waits for, and ends at ranks that do not wait. Those
// are to blame: dead, frozen, or slow. Where it ends nowhere, ranks wait for each other in a circle, which they
// do when they are not at the same operation.
#ifndef CF_INQUIRY_H
#define CF_INQUIRY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { CF_INQUIRY_GROUPS = 16, CF_INQUIRY_LABEL = 64 };

// What a rank says of itself. It travels as it is.
typedef struct cf_whereabouts {
    int32_t waits;                     // for peer; otherwise it computes
    int32_t peer;                      // world rank; -1: all others of its group, in a collective
    int32_t first, stride, size;       // world ranks of that group: first, first + stride, …
    int32_t group;                     // as numbered in the order bound, the same on all ranks
    int32_t layer, step;               // of what it waits for, or the last that it has posted; -1: none
    double since_s;                    // for how long it has done so
    int64_t posted[CF_INQUIRY_GROUPS]; // requests so far in each of its groups
    char label[CF_INQUIRY_LABEL];      // of the operation; "": nothing yet
} cf_whereabouts;

typedef enum { CF_UNASKED, CF_ASKED, CF_ANSWERED, CF_SILENT, CF_GONE } cf_answer_kind;

typedef struct cf_answer {
    cf_answer_kind kind;
    cf_whereabouts where; // where CF_ANSWERED
} cf_answer;

// answers[r] is world rank r's, and answers[me] says for whom this rank waits. Whom to ask next: unasked ranks that
// this rank waits for, or those that these wait for, and so on. Returns how many, in next (size).
int cf_inquiry_next(const cf_answer *answers, int size, int me, int *next);

// What is to be said behind "rank 0 waits for rank 1: …", as "; rank 1 does not answer: …". Returns a hint.
const char *cf_inquiry_verdict(const cf_answer *answers, int size, int me, char *text, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
