// The line a person watches: on a terminal one line that updates in place, in a file or pipe plain lines.
#ifndef PROGRESS_H
#define PROGRESS_H

#include "problem.h"

CF_EXTERN_C_BEGIN

// Is a person looking? Open MPI gives every rank a terminal of its own, so under it the launcher's standard
// output decides.
bool progress_on_terminal(void);

// Show a line of fields, which tabs part (shown as two blanks); on a terminal the next one replaces it. Where it is too narrow
// for all of them, fields from the third on give way, the last one never. last: keep the line and go to the next. Where
// nobody reads what is written, it is left out after a tenth of a second.
void progress_show(const char *line, bool last);
// End a line in place, so that other output starts on its own line.
void progress_break(void);

CF_EXTERN_C_END
#endif
