// The standard streams of a program, so that nothing that happens to them harms its run.
#pragma once

#include <stdint.h>
#include "extern_c.h"

CF_EXTERN_C_BEGIN

// Call it before anything else. What is closed becomes /dev/null, because libraries would get its number for files of their own.
// From here on no print to stdout waits for a terminal, pager or pipe that is not read: the text waits, up to a limit, until the
// program prints again or ends. (Where stdout cannot be replaced, prints wait as usual.)
void cf_streams_open(void);
// Bytes that wait, after an attempt to write them.
int64_t cf_streams_waiting(void);
// Writes what waits, as far as it is read within that time; -1: until it is read, or nobody can read it any more.
void cf_streams_drain(int wait_ms);

CF_EXTERN_C_END
