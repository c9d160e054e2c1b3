// The standard streams of a program, so that nothing that happens to them harms its run.
#pragma once
// Call it before anything else. What is closed becomes /dev/null, because libraries would get its number for files of their own.
// From here on no print to stdout waits for a terminal, pager or pipe that is not read: up to a megabyte of text waits
// until it is. (Where stdout cannot be replaced, prints wait as usual.)
void cf_streams_open(void);
int cf_streams_waiting(void); // bytes that wait, about; 0: none
// Writes what waits, as far as it is read within that time; -1: until it is read, or nobody can read it any more.
void cf_streams_drain(int wait_ms);
