// Between a host that notes what it enqueues (clock_host.cc) and the clock that reads it (clock.cc).
#ifndef EMULATOR_CLOCK_H
#define EMULATOR_CLOCK_H

#include "emulator.h"
#include <cstring>
#include <string>
#include <vector>

namespace emulator {

struct Hello { // of a host, first of all
    int rank, device, process, thread;
};
struct Passed {
    uint64_t event;
    double time;
};
struct Reply {     // to an ASK
    double time;   // -1: has not passed by the time at which it was asked
    double now;    // what has passed by then has been reported
    uint64_t news; // so many Passed follow
};

// Reads the notes of all ranks until they have ended.
void keep_time(int listener, int ranks);

} // namespace emulator
#endif
