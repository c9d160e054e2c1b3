// What a host, which sends notes of all that it enqueues (clock_host.cc), and the clock (clock.cc) exchange.
#pragma once

#include "emulator.h"
#include <cstring>
#include <string>
#include <vector>

namespace emulator {

struct Hello { // a host's first message
    int rank, device, process, thread;
};
struct Passed {
    uint64_t event;
    double time;
};
struct Reply {     // to an ASK
    double time;   // -1: the event has not passed at the time of the question
    double now;    // all events up to this time have been reported
    uint64_t news; // number of Passed that follow
};

// Reads the notes of all ranks until they have ended.
void keep_time(int listener, int ranks);

} // namespace emulator
