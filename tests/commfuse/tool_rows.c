// The table of algorithms for tests in Python, a row a line: name, whose bits it shares ("-": nobody's), the most slices, and what
// it is: "alias", "bound", "native" or "exchanges", then "tail-free" where it promises that.
#include <stdio.h>
#include "tests/commfuse/rows.h"

int main(void) {
    for (EVERY_ROW(row)) {
        const char *kind = row->bound ? "bound" : !row->serves ? "alias" : row->native ? "native" : "exchanges";
        printf("%s %s %d %s%s\n", row->name, row->same_bits ? row->same_bits : "-", row->max_slices, kind,
               row->tail_free ? " tail-free" : "");
    }
    return 0;
}
