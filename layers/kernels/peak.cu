// See peak.h. The figures are those of NVIDIA's data sheets and architecture papers for the full, unshared device: bf16 products
// accumulated in fp32 on the tensor cores, without sparsity, and fp32 outside of them. The full name must match, because
// devices with nearly the same name (a laptop's, a part of a device, a custom order) may be different, and no figure is better
// than a wrong one.
#include "peak.h"

static const struct {
    const char *name;
    double bf16, fp32; // Tflop/s
} devices[] = {
    {"NVIDIA GB200", 2500, 80},
    {"NVIDIA B200", 2250, 75},
    {"NVIDIA GH200 480GB", 989.4, 66.9},
    {"NVIDIA GH200 120GB", 989.4, 66.9},
    {"NVIDIA H200", 989.4, 66.9},
    {"NVIDIA H200 NVL", 835.5, 60},
    {"NVIDIA H100 80GB HBM3", 989.4, 66.9},
    {"NVIDIA H100 PCIe", 756, 51.2},
    {"NVIDIA H100 NVL", 835.5, 60},
    {"NVIDIA A100-SXM4-40GB", 312, 19.5},
    {"NVIDIA A100-SXM4-80GB", 312, 19.5},
    {"NVIDIA A100-PCIE-40GB", 312, 19.5},
    {"NVIDIA A100 80GB PCIe", 312, 19.5},
    {"NVIDIA L40S", 362, 91.6},
    {"NVIDIA L40", 181, 90.5},
    {"NVIDIA L4", 121, 30.3},
    {"NVIDIA RTX 6000 Ada Generation", 364.2, 91.1},
    {"NVIDIA RTX A6000", 154.8, 38.7},
    {"NVIDIA GeForce RTX 5090", 209.5, 104.8},
    {"NVIDIA GeForce RTX 4090", 165.2, 82.6},
    {"NVIDIA GeForce RTX 3090", 71, 35.6},
};

bool peak_emulated(void) {
    return false;
}

double peak_flops(bool fp32, const char **source, double, cf_transport *transport, cf_stream *) {
    static char unknown[160];
    const bool bf16 = REAL_DTYPE == CF_BF16;
    double tflops = 0;
    if (fp32) return 0; // bf16 is not emulated
    snprintf(unknown, sizeof unknown, "unknown device %s: give --peak-tflops", cf_device_name());
    for (const auto &device : devices)
        if (strcmp(device.name, cf_device_name()) == 0) tflops = bf16 ? device.bf16 : device.fp32;
    *source = tflops == 0 ? unknown : bf16 ? "the device's data sheet: dense bf16" : "the device's data sheet: fp32, not TF32";
    return cf_allreduce_sum(transport, tflops * 1e12);
}
