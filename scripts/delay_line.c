// A delay line for packets: what comes out of a TAP device goes back into it DELAY_US microseconds later.
//
//     delay_line DEVICE DELAY_US
//
// scripts/lab.py compiles and starts one for each host whose link has a delay, redirects what the host sends into
// the device, and makes the device a port of the bridge, where the packet goes on. Linux has netem for this, but as
// a module that some kernels lack. Packets keep their header of offloads, so that a segment of 64 KiB stays one packet.
//
// It runs ahead of every ordinary process, for a moment per packet, on the core of the host that sends: the same
// core where the kernel does the rest of that packet's work.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { PACKETS_MAX = 1 << 14, PACKET_BYTES_MAX = 1 << 17 };

typedef struct packet {
    int64_t leaves_ns;
    ssize_t bytes;
    char *data;
} packet;

typedef struct line {
    int device;
    int64_t delay_ns;
    uint64_t first, next; // packets first … next − 1 are under way
    packet under_way[PACKETS_MAX];
} line;

static void fail(const char *what) {
    fprintf(stderr, "delay_line: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static int open_device(const char *name) {
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (device < 0) fail("/dev/net/tun");
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    if (ioctl(device, TUNSETIFF, &request) != 0) fail("TUNSETIFF");
    if (ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) != 0) fail("TUNSETOFFLOAD");
    return device;
}

// Takes every packet that has come.
static void take(line *l) {
    static char data[PACKET_BYTES_MAX];
    while (l->next - l->first < PACKETS_MAX) {
        ssize_t bytes = read(l->device, data, sizeof data);
        if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (bytes < 0 && errno != EIO) fail("read"); // EIO: the device is not up yet
        if (bytes <= 0) return;
        packet *p = &l->under_way[l->next++ % PACKETS_MAX];
        *p = (packet){.leaves_ns = now_ns() + l->delay_ns, .bytes = bytes, .data = malloc((size_t)bytes)};
        if (!p->data) fail("malloc");
        memcpy(p->data, data, (size_t)bytes);
    }
}

// Gives back the packets whose time has come.
static void give(line *l) {
    while (l->first < l->next) {
        packet *p = &l->under_way[l->first % PACKETS_MAX];
        if (p->leaves_ns > now_ns()) return;
        if (write(l->device, p->data, (size_t)p->bytes) < 0 && errno == EAGAIN) return;
        free(p->data);
        l->first++;
    }
}

static void wait_for_work(const line *l) {
    struct pollfd device = {.fd = l->device, .events = POLLIN};
    struct timespec rest = {0};
    if (l->first < l->next) {
        int64_t ns = l->under_way[l->first % PACKETS_MAX].leaves_ns - now_ns();
        if (ns <= 0) return;
        rest = (struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    }
    bool full = l->next - l->first == PACKETS_MAX;
    ppoll(&device, full ? 0 : 1, l->first < l->next ? &rest : NULL, NULL);
}

int main(int count, char **arguments) {
    static line l;
    if (count != 3) {
        fprintf(stderr, "usage: delay_line DEVICE DELAY_US\n");
        return 1;
    }
    l.device = open_device(arguments[1]);
    l.delay_ns = (int64_t)(atof(arguments[2]) * 1e3);
    struct sched_param first = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_FIFO, &first) != 0) fail("cannot run ahead of ordinary processes");
    printf("%d\n", (int)getpid()); // ready
    fflush(stdout);
    for (;;) {
        take(&l);
        give(&l);
        wait_for_work(&l);
    }
}
