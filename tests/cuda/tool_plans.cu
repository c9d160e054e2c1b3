// Does cuDNN take the graphs of layers/kernels/attention_cudnn.cu, and what kernels come out of them? Asked for a GPU that need
// not be there: since 9.8 cuDNN makes plans from a description of a device in place of the device (its documentation
// calls it deviceless ahead-of-time compilation). So a shape that would fall back to the own kernels, a mask that is not
// recognised, or an engine without determinism is found wherever nvcc and cuDNN are, not first on a GPU.
//
//     LD_LIBRARY_PATH=build/cuda-bf16/tests/cuda/driver build/cuda-bf16/tests/cuda/tool_plans [GPU …]
//
// A line for each GPU, pass and shape: workspace in bytes, what cuDNN says, and the kernel.
//
// The file under test is compiled as it is, but for cudnnBackendSetAttribute: what would be given a handle is given the
// description. libcuda.so.1 is driver.c.
#include <cudnn.h>
#include <dlfcn.h>
#include <stdio.h>

#if CUDNN_VERSION < 90800
int main(void) {
    printf("skipped: it needs cuDNN 9.8 to be asked about GPUs that are not here, and this is %d\n", CUDNN_VERSION);
    return 0;
}
#else

static cudnnStatus_t set_for_device(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                    int64_t count, const void *values);
#define cudnnBackendSetAttribute set_for_device
#include "layers/kernels/attention_cudnn.cu"
#undef cudnnBackendSetAttribute

static descriptor device; // the GPU asked about

static cudnnStatus_t set_for_device(descriptor d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
                                    const void *values) {
    if (name == CUDNN_ATTR_OPERATIONGRAPH_HANDLE) return CUDNN_STATUS_SUCCESS;
    if (name == CUDNN_ATTR_EXECUTION_PLAN_HANDLE)
        return cudnnBackendSetAttribute(d, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
    cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
    if (name == CUDNN_ATTR_ENGINEHEUR_MODE)
        status = cudnnBackendSetAttribute(d, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
    return status == CUDNN_STATUS_SUCCESS ? cudnnBackendSetAttribute(d, name, type, count, values) : status;
}

// --- GPUs, by what their drivers tell

typedef struct gpu {
    const char *name, *full_name;
    int version, multiprocessors, shared_optin, blocks, threads, pci_id, sm_khz, memory_khz, l2_bytes;
    int64_t bytes;
} gpu;

static const gpu gpus[] = {
    {"A100", "NVIDIA A100-SXM4-80GB", 800, 108, 166912, 32, 2048, 0x20b210de, 1410000, 1593000, 41943040, 85051572224},
    {"RTX-4090", "NVIDIA GeForce RTX 4090", 890, 128, 101376, 24, 1536, 0x268410de, 2520000, 10501000, 75497472, 25386352640},
    {"H100", "NVIDIA H100 80GB HBM3", 900, 132, 232448, 32, 2048, 0x233010de, 1980000, 2619000, 52428800, 85017624576},
    {"H200", "NVIDIA H200", 900, 132, 232448, 32, 2048, 0x233510de, 1980000, 3201000, 52428800, 150754820096},
    {"B200", "NVIDIA B200", 1000, 148, 232448, 32, 2048, 0x290110de, 1965000, 3996000, 132644864, 191503147008}};

static descriptor describe(const gpu *g) {
    char text[2048];
    int length = snprintf(text, sizeof text,
                          "{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,"
                          "\"multiProcessorCount\":%d,\"warpSize\":32,\"maxSharedMemoryPerBlock\":49152,"
                          "\"maxSharedMemoryPerBlockOptin\":%d,\"reservedSharedMemoryPerBlock\":1024,"
                          "\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":%d,\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":%d,"
                          "\"pciDeviceId\":%d,\"isTccDriver\":0,\"supportCoopLaunch\":1,\"totalGlobalMem\":%lld,"
                          "\"smClockRateKHz\":%d,\"memClockRateKHz\":%d,\"l2CacheSize\":%d,\"cudaDeviceId\":0,"
                          "\"deviceVer\":%d,\"driverVer\":13000,\"deviceName\":\"%s\"}",
                          g->multiprocessors, g->shared_optin, g->blocks, g->threads, g->pci_id, (long long)g->bytes, g->sm_khz,
                          g->memory_khz, g->l2_bytes, g->version, g->full_name);
    graph of = {};
    descriptor d = make(&of, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR,
                        {{CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, length, text}});
    if (of.status == CUDNN_STATUS_SUCCESS) return d;
    char cause[512] = "";
    cudnnGetLastErrorString(cause, sizeof cause);
    cf_die(NULL, "cuDNN does not take the description of %s: %s (%s)", g->name, cudnnGetErrorString(of.status), cause);
}

// --- shapes: whole sequences, ranges of Query-Split, and odd ones

static const problem shapes[] = {{FORWARD, 1024, 1024, 16, 12, 12, 64, 16}, // d12, and its heads on 2 and 4 ranks
                                 {FORWARD, 1024, 1024, 16, 6, 6, 64, 16},   {FORWARD, 1024, 1024, 8, 25, 25, 64, 8}, // d48
                                 {FORWARD, 2048, 2048, 4, 16, 16, 128, 4}, // heads of 128 channels
                                 {FORWARD, 512, 1024, 16, 6, 6, 64, 16},   // the last of two ranges, of four, and one between
                                 {FORWARD, 256, 1024, 16, 3, 3, 64, 16},    {FORWARD, 256, 512, 16, 3, 3, 64, 16},
                                 {FORWARD, 1024, 1024, 16, 9, 3, 64, 16}, // heads that share keys: SmolLM2 135M,
                                 {FORWARD, 2048, 2048, 4, 16, 4, 64, 4},  // Llama 3.2 1B on two ranks,
                                 {FORWARD, 1024, 2048, 4, 16, 4, 64, 4},  // its last of two ranges,
                                 {FORWARD, 1024, 1024, 2, 8, 1, 128, 2},  // and of one head for all
                                 {FORWARD, 100, 300, 2, 5, 5, 64, 2},     // nothing is a multiple of anything
                                 {FORWARD, 300, 300, 2, 5, 5, 64, 2},       {FORWARD, 33, 65, 3, 4, 4, 40, 3},
                                 {FORWARD, 65, 65, 3, 4, 2, 40, 3},         {FORWARD, 2, 2, 1, 1, 1, 8, 1}};

static void ask(const gpu *g, const problem *of, const char *kernel) {
    plan *p = plan_for(of);
    printf("%s %s n=%lld keys=%lld B=%lld H=%lld KV=%lld D=%lld workspace=%lld %s %s\n", g->name,
           of->pass == FORWARD ? "forward" : "backward", (long long)of->n, (long long)of->keys, (long long)of->B, (long long)of->H,
           (long long)of->KV, (long long)of->D, (long long)p->workspace, p->execution ? "plan" : cudnnGetErrorString(p->refusal),
           p->execution ? kernel : "-");
    fflush(stdout);
}

static void ask_about(const gpu *g, const char *kernel) {
    device = describe(g);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int pass = FORWARD; pass <= BACKWARD; pass++) {
            problem of = shapes[i];
            of.pass = (direction)pass;
            if (pass == BACKWARD && of.n < of.keys) continue; // it is always of all rows
            ask(g, &of, kernel);
            of.all = 4 * of.B; // of some sequences among others
            if (pass == BACKWARD) ask(g, &of, kernel);
        }
    cudnn.plans = 0; // another GPU's are others
}

static bool named(const gpu *g, int count, char **names) {
    for (int i = 0; i < count; i++)
        if (strcmp(names[i], g->name) == 0) return true;
    return false;
}

int main(int count, char **arguments) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    const char *kernel = driver ? (const char *)dlsym(driver, "driver_kernel") : NULL;
    if (!kernel) cf_die("LD_LIBRARY_PATH=build/cuda-bf16/tests/cuda/driver", "libcuda.so.1 is not tests/cuda/driver.c");
    for (size_t i = 0; i < sizeof gpus / sizeof *gpus; i++)
        if (count == 1 || named(&gpus[i], count - 1, arguments + 1)) ask_about(&gpus[i], kernel);
    return 0;
}

#endif
