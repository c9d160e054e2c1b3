// NVTX: ranges of a thread, which nest. With EMULATOR_RANGES=FILE each is a line of FILE.PROCESS when it begins: "outer/inner NUMBER",
// -1 where it has none; the last line, "open N", is written at the end: so many had not ended.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <unistd.h>
#include "emulator.h"
#include "include/nvtx3/nvToolsExt.h"

namespace {
struct Profile {
    FILE *file = nullptr;
    std::vector<std::string> open;
    Profile() {
        if (const char *path = getenv("EMULATOR_RANGES")) file = fopen((path + ("." + std::to_string(getpid()))).c_str(), "w");
    }
    ~Profile() {
        if (file) fprintf(file, "open %zu\n", open.size()), fclose(file);
    }
} profile;
} // namespace

int nvtxRangePushEx(const nvtxEventAttributes_t *a) {
    if (a->version != NVTX_VERSION || a->size != sizeof *a || a->messageType != NVTX_MESSAGE_TYPE_ASCII || !*a->message.ascii)
        emulator::fail("nvtxRangePushEx: not the attributes of a range with a name");
    const bool number = a->payloadType == NVTX_PAYLOAD_TYPE_INT32;
    profile.open.push_back((profile.open.empty() ? "" : profile.open.back() + "/") + a->message.ascii);
    if (profile.file) fprintf(profile.file, "%s %d\n", profile.open.back().c_str(), number ? a->payload.iValue : -1);
    return (int)profile.open.size() - 1;
}

int nvtxRangePop(void) {
    if (profile.open.empty()) emulator::fail("nvtxRangePop: no range is open");
    profile.open.pop_back();
    return (int)profile.open.size();
}
