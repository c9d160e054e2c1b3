// What stands in for a driver (libcuda.so.1) while cuDNN makes plans for a GPU that is not there: its compiler needs no
// GPU, but it ends by loading what it has compiled. Here that is taken, and the kernel's name is kept. Everything else
// that cuDNN looks up says what the toolkit's own stub says; what is missing it names itself ("Could not load symbol").
#include <stdio.h>

enum { CUDA_SUCCESS, CUDA_ERROR_STUB_LIBRARY = 34 };

char driver_kernel[512]; // the last that was asked for

static int something;

int cuLibraryLoadData(void **library);
int cuLibraryLoadData(void **library) { // and seven more arguments that do not matter here
    *library = &something;
    return CUDA_SUCCESS;
}

int cuLibraryGetKernel(void **kernel, void *library, const char *name);
int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    (void)library;
    snprintf(driver_kernel, sizeof driver_kernel, "%s", name);
    *kernel = &something;
    return CUDA_SUCCESS;
}

#define ABSENT(name)                                                                                                               \
    int name(void);                                                                                                                \
    int name(void) {                                                                                                               \
        return CUDA_ERROR_STUB_LIBRARY;                                                                                            \
    }
ABSENT(cuCtxGetCurrent)
ABSENT(cuCtxGetLimit)
ABSENT(cuCtxPopCurrent)
ABSENT(cuCtxPushCurrent)
ABSENT(cuDeviceGet)
ABSENT(cuDeviceGetCount)
ABSENT(cuDriverGetVersion)
ABSENT(cuGetErrorName)
ABSENT(cuGetErrorString)
ABSENT(cuInit)
ABSENT(cuKernelGetAttribute)
ABSENT(cuKernelSetAttribute)
ABSENT(cuLaunchCooperativeKernel)
ABSENT(cuLaunchKernel)
ABSENT(cuLaunchKernelEx)
ABSENT(cuLibraryLoadFromFile)
ABSENT(cuLibraryUnload)
ABSENT(cuLinkAddData)
ABSENT(cuLinkComplete)
ABSENT(cuLinkCreate)
ABSENT(cuLinkDestroy)
ABSENT(cuOccupancyMaxPotentialClusterSize)
ABSENT(cuStreamGetCtx)
