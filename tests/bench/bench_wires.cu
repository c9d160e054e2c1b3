// What the transports between GPUs rely on and no emulator can tell, on one GPU or two, within half a minute. A line for each
// figure says what is good; each section decides something in commfuse/gpu/transport_cuda.cu or transport_ipc.cu:
//
//   the device      whether CUDA IPC can be used at all
//   two processes   ping-pong through mapped memory, as between two ranks: what a word costs on its way, each way once a
//                   message; on GPU 0 and 1. (Where there is one, they take turns: two do better, not worse.)
//   copies          how fast; across the link one should end while a kernel holds every multiprocessor. Within the GPU
//                   the driver takes a kernel, which waits for them
//   streams         how many never stand behind one that waits: CUDA_DEVICE_MAX_CONNECTIONS, OTHER_STREAMS
//   run-ahead       what fits behind a wait before the host is held up: bounds RUN_AHEAD
//   chunks          wait for a word, copy, write a word, 50 in a row: from which size on words cost little
//
// A section runs in a process of its own (the second in two), started before anything of CUDA is used: one that fails
// or hangs is told, and the others are measured all the same. The status is 0 if all are.
//
// What is timed stands behind a gate, a word that the host writes when all is enqueued: the host's own time is in no
// figure. Nothing is done for the first time while a gate is closed: loading a kernel may wait for streams that wait. (So
// all are loaded at start, and copies of every size have been made: the driver has several kernels for them.)
#include "commfuse/gpu/cuda.h"
#include <cublasLt.h>
#include <cuda.h>
#include <cudnn.h>
#include <errno.h>
#include <nccl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    RUN_S = 28,     // the whole run
    SECTION_S = 10, // one section
    PAIR = 2,
    LINE = 64,
    SLOTS = 2,
    REPETITIONS = 5,
    WARM_UP = 3,
    ROW = 50,             // calls that are timed together
    HOLD_THREADS = 512,   // of a block: divides what a multiprocessor takes
    STREAMS = 32,         // as many queues as transport_cuda.cu asks for
    HELD_UP_MS = 20,      // what has not run by then stands behind the stream that waits
    FLOOD_MAX = 16 << 10, // as good as no limit
    STUCK_MS = 100,       // a call that takes so long is held up
    ENTRY_VERSION = 12000
};
static const char *const CONNECTIONS = "32"; // as in transport_cuda.cu
static const int64_t KIB = 1 << 10, MIB = 1 << 20, BYTES_MAX = 64 << 20;
static const long long HOLD_NS = 20 * 1000 * 1000;

typedef struct word { // on a cache line of its own
    uint32_t value, pad[LINE / 4 - 1];
} word;

typedef struct word_set { // in host memory that the device sees
    word gate, count, scratch;
} word_set;

typedef struct board { // memory that both processes of the pair share
    word_set words;
    word met;
    cudaIpcMemHandle_t handle[PAIR];
} board;

typedef CUresult stream_word(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags);

typedef struct bench { // what a section measures with
    int rank;          // 1: the second process of the pair
    stream_word *wait_value, *write_value;
    unsigned flush; // flag of a wait, as in transport_ipc.cu
    word_set *words;
    uint32_t gates, chunks, turns, meetings; // so far
    cf_stream *stream;                       // of the priority that transfers have
    cudaEvent_t event;
    char *from, *to; // BYTES_MAX, and after it a word, which the other process writes
} bench;

typedef void work(bench *b, cf_stream *stream, int64_t bytes);

static board *shared;

CF_PRINTF(5, 6)
static void figure(double value, int decimals, const char *unit, const char *good, const char *format, ...) {
    char what[80];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    printf("  %-57s %9.*f %-5s %s\n", what, decimals, value, unit, good);
}

static void rest(double ms) {
    struct timespec pause = {0, (long)(ms * 1e6)};
    nanosleep(&pause, NULL);
}

// --- what streams are given to do ---

static __global__ void nothing() {}

static __global__ void hold(long long ns) {
    const int64_t begin = cf_device_ns();
    while (cf_device_ns() - begin < ns) {}
}

static void operate(bench *b, stream_word *operation, cf_stream *stream, word *at, uint32_t value, unsigned flags) {
    CUdeviceptr address = (CUdeviceptr)(uintptr_t)&at->value;
    CUresult code = operation((CUstream)cf_cuda_stream(stream), address, value, flags);
    if (code != CUDA_SUCCESS)
        cf_die("use --transport nccl on this machine", "a stream cannot %s a word of memory: driver error %d",
               operation == b->wait_value ? "wait for" : "write", (int)code);
}

static void wait_word(bench *b, cf_stream *stream, word *at, uint32_t value) {
    operate(b, b->wait_value, stream, at, value, CU_STREAM_WAIT_VALUE_GEQ | b->flush);
}

static void write_word(bench *b, cf_stream *stream, word *at, uint32_t value) {
    operate(b, b->write_value, stream, at, value, CU_STREAM_WRITE_VALUE_DEFAULT);
}

static void close_gate(bench *b, cf_stream *stream) {
    wait_word(b, stream, &b->words->gate, ++b->gates);
}

static void open_gate(bench *b) {
    __atomic_store_n(&b->words->gate.value, b->gates, __ATOMIC_RELEASE);
}

static void kernel(bench *b, cf_stream *stream, int64_t bytes) {
    (void)b, (void)bytes;
    cf_launch(nothing, {1}, 1, stream);
}

static void record(bench *b, cf_stream *stream, int64_t bytes) {
    (void)bytes;
    CF_CUDA(cudaEventRecord(b->event, cf_cuda_stream(stream)));
}

static void write_scratch(bench *b, cf_stream *stream, int64_t bytes) {
    (void)bytes;
    write_word(b, stream, &b->words->scratch, 1);
}

static void copy(bench *b, cf_stream *stream, int64_t bytes) {
    cf_copy(b->to, b->from, bytes, stream);
}

// As transport_ipc.cu has it, but that the word it waits for is the one which the chunk before has written.
static void chunk(bench *b, cf_stream *stream, int64_t bytes) {
    uint32_t n = b->chunks++;
    wait_word(b, stream, &b->words->count, n);
    cf_copy(b->to + n % SLOTS * bytes, b->from, bytes, stream);
    write_word(b, stream, &b->words->count, n + 1);
}

// --- start ---

static int attribute(cudaDeviceAttr which) {
    int value = 0, device = 0;
    CF_CUDA(cudaGetDevice(&device));
    CF_CUDA(cudaDeviceGetAttribute(&value, which, device));
    return value;
}

static stream_word *driver_function(const char *name) {
    void *function = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    CF_CUDA(cudaGetDriverEntryPointByVersion(name, &function, ENTRY_VERSION, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess) cf_die("update the driver, or use --transport nccl", "the driver has no %s", name);
    return (stream_word *)function;
}

// Only the pair needs shared ones: a host where those cannot be had still gives the other figures.
static void make_words(bench *b, int processes) {
    if (processes == PAIR) {
        CF_CUDA(cudaHostRegister(shared, sizeof *shared, cudaHostRegisterPortable | cudaHostRegisterMapped));
        b->words = &shared->words;
        return;
    }
    CF_CUDA(cudaMallocHost((void **)&b->words, sizeof *b->words));
    memset(b->words, 0, sizeof *b->words);
}

// Everything that will be done behind closed gates; and the clocks wake up.
static void first_times(bench *b) {
    kernel(b, b->stream, 0);
    cf_launch(hold, {1}, HOLD_THREADS, b->stream, HOLD_NS);
    for (int64_t bytes = 4 * KIB; bytes <= BYTES_MAX; bytes *= 4) cf_copy(b->to, b->from, bytes, b->stream);
    record(b, b->stream, 0);
    write_scratch(b, b->stream, 0);
    cf_event_record(b->stream);
    cf_stream_sync(b->stream);
}

static void open_bench(bench *b, int rank, int processes) {
    b->rank = rank;
    cf_device_open(rank); // the pair: on two GPUs, if there are two
    b->wait_value = driver_function("cuStreamWaitValue32");
    b->write_value = driver_function("cuStreamWriteValue32");
    b->flush = attribute(cudaDevAttrCanFlushRemoteWrites) ? CU_STREAM_WAIT_VALUE_FLUSH : 0;
    make_words(b, processes);
    b->stream = cf_cuda_stream_urgent();
    CF_CUDA(cudaEventCreate(&b->event));
    b->from = (char *)cf_alloc(BYTES_MAX, "benchmark");
    b->to = (char *)cf_alloc(BYTES_MAX + LINE, "benchmark");
    first_times(b);
}

// --- the device ---

static void device_facts(void) {
    int driver = 0;
    CF_CUDA(cudaDriverGetVersion(&driver));
    printf("  %s, driver for CUDA %d.%d, program of CUDA %d.%d, CUDA_DEVICE_MAX_CONNECTIONS=%s\n", cf_device_name(), driver / 1000,
           driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, getenv("CUDA_DEVICE_MAX_CONNECTIONS"));
    int nccl = 0;
    ncclGetVersion(&nccl);
    const char *const same = "the headers', in brackets: another version may be slower, or wrong";
    printf("  cuBLASLt %zu (%d), cuDNN %zu (%d), NCCL %d (%d): %s\n", cublasLtGetVersion(), CUBLAS_VERSION, cudnnGetVersion(),
           CUDNN_VERSION, nccl, NCCL_VERSION_CODE, same);
    figure(cf_cuda_properties()->multiProcessorCount, 0, "", "", "multiprocessors");
    figure(attribute(cudaDevAttrAsyncEngineCount), 0, "", "2 or more: both directions at once", "copy engines");
    figure(attribute(cudaDevAttrCanFlushRemoteWrites), 0, "", "1: transport_ipc.cu asks for it; 0: it tries their order out",
           "waits can flush remote writes");
    figure(attribute(cudaDevAttrComputeMode), 0, "", "0: two processes may use this GPU", "compute mode");
}

static void measure_device(bench *b) {
    (void)b;
    device_facts();
}

// --- two processes ---

static void meet(bench *b) {
    uint32_t all = PAIR * ++b->meetings;
    __atomic_add_fetch(&shared->met.value, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&shared->met.value, __ATOMIC_ACQUIRE) < all) rest(0.05);
}

static char *map_peer(bench *b) {
    void *peer = NULL;
    CF_CUDA(cudaIpcGetMemHandle(&shared->handle[b->rank], b->to));
    meet(b);
    CF_CUDA(cudaIpcOpenMemHandle(&peer, shared->handle[1 - b->rank], cudaIpcMemLazyEnablePeerAccess));
    return (char *)peer;
}

static void serve(bench *b, char *peer, int64_t bytes, uint32_t turn) {
    cf_copy(peer, b->from, bytes, b->stream);
    write_word(b, b->stream, (word *)(peer + BYTES_MAX), turn);
}

static void await(bench *b, uint32_t turn) {
    wait_word(b, b->stream, (word *)(b->to + BYTES_MAX), turn);
}

static void play(bench *b, char *peer, int64_t bytes, int turns) {
    for (int i = 0; i < turns; i++) {
        uint32_t turn = ++b->turns;
        if (b->rank == 1) await(b, turn);
        serve(b, peer, bytes, turn);
        if (b->rank == 0) await(b, turn);
    }
}

static double us_between(cf_event begin, cf_event end) {
    return (cf_event_ms(end) - cf_event_ms(begin)) * 1e3;
}

// Half of a turn. The other process waits for the ping, so that one gate is enough.
static double each_way_us(bench *b, char *peer, int64_t bytes) {
    play(b, peer, bytes, WARM_UP);
    cf_stream_sync(b->stream);
    if (b->rank == 0) close_gate(b, b->stream);
    cf_event begin = cf_event_record(b->stream);
    play(b, peer, bytes, ROW);
    cf_event end = cf_event_record(b->stream);
    meet(b);
    if (b->rank == 0) open_gate(b);
    cf_stream_sync(b->stream);
    return us_between(begin, end) / ROW / 2;
}

static int content(uint32_t turn) {
    return 1 + turn % 100;
}

// Every turn brings other bytes; what has come with the word is put aside.
static void play_and_keep(bench *b, char *peer, char *aside, int64_t bytes) {
    for (int i = 0; i < ROW; i++) {
        uint32_t turn = ++b->turns;
        CF_CUDA(cudaMemsetAsync(b->from, content(turn), (size_t)bytes, cf_cuda_stream(b->stream)));
        if (b->rank == 0) serve(b, peer, bytes, turn);
        await(b, turn);
        cf_copy(aside + i * bytes, b->to, bytes, b->stream);
        if (b->rank == 1) serve(b, peer, bytes, turn);
    }
}

// Turns in which a word came before all of its bytes had.
static int early_words(bench *b, char *peer, int64_t bytes) {
    char *aside = (char *)cf_alloc(ROW * bytes, "benchmark"), *seen = (char *)malloc((size_t)(ROW * bytes));
    if (!seen) cf_die(NULL, "out of memory for what %d turns bring", ROW);
    uint32_t first = b->turns + 1;
    play_and_keep(b, peer, aside, bytes);
    cf_copy(seen, aside, ROW * bytes, b->stream);
    cf_stream_sync(b->stream);
    int early = 0;
    for (int i = 0; i < ROW; i++) {
        const char *brought = seen + i * bytes;
        bool alike = memcmp(brought, brought + 1, (size_t)bytes - 1) == 0;
        early += !alike || brought[0] != content(first + (uint32_t)i);
    }
    free(seen);
    return early;
}

static void measure_pair(bench *b) {
    static const int64_t sizes[] = {0, KIB, 256 * KIB, MIB, 4 * MIB};
    char *peer = map_peer(b);
    int devices = 0;
    CF_CUDA(cudaGetDeviceCount(&devices));
    if (b->rank == 0)
        figure(devices < PAIR ? 1 : PAIR, 0, "", "2: the link between them is measured; 1: none is", "GPUs of the pair");
    for (int64_t bytes : sizes) {
        double us = each_way_us(b, peer, bytes);
        const char *good = bytes ? "" : "below 9 between two GPUs; processes on one take turns";
        if (b->rank == 0) figure(us, 1, "us", good, "ping-pong of %lld KiB, each way", (long long)(bytes / KIB));
    }
    int early = early_words(b, peer, MIB);
    if (early > 0)
        cf_die("use --transport nccl on this machine",
               "process %d: in %d of %d turns a word came before the bytes that it stands for", b->rank, early, ROW);
    meet(b);
    if (b->rank == 0) figure(0, 0, "", "0", "turns of %d in which a word came before its bytes", ROW);
    CF_CUDA(cudaIpcCloseMemHandle(peer));
    meet(b); // before either gives back what the other has mapped
}

// --- copies ---

// Microseconds of a call, ROW of which follow each other; the fastest of REPETITIONS.
static double time_of(bench *b, work *run, int64_t bytes) {
    double fastest = 1e300;
    for (int i = 0; i < REPETITIONS; i++) {
        close_gate(b, b->stream);
        cf_event begin = cf_event_record(b->stream);
        for (int call = 0; call < ROW; call++) run(b, b->stream, bytes);
        cf_event end = cf_event_record(b->stream);
        open_gate(b);
        cf_stream_sync(b->stream);
        double us = us_between(begin, end) / ROW;
        if (us < fastest) fastest = us;
    }
    return fastest;
}

static double gb_per_s(int64_t bytes, double us) {
    return (double)bytes / us * 1e-3;
}

// Its blocks take all threads that there are, so that nothing else finds room.
static cf_event hold_all(cf_stream *stream) {
    int blocks = attribute(cudaDevAttrMaxThreadsPerMultiProcessor) / HOLD_THREADS * cf_cuda_properties()->multiProcessorCount;
    cf_launch(hold, {blocks}, HOLD_THREADS, stream, HOLD_NS);
    return cf_event_record(stream);
}

// Milliseconds until a copy is done that is asked for while a kernel holds all multiprocessors.
static double beside_kernel_ms(bench *b, int64_t bytes) {
    cf_stream *kernels = cf_stream_create();
    cf_event held = hold_all(kernels);
    rest(2); // it has begun
    double begin_ms = cf_now_ms();
    if (cf_event_passed(held)) cf_die(NULL, "the kernel that should hold the multiprocessors did not");
    copy(b, b->stream, bytes);
    cf_event copied = cf_event_record(b->stream);
    while (!cf_event_passed(copied)) {}
    double took_ms = cf_now_ms() - begin_ms;
    cf_stream_sync(kernels);
    cf_stream_free(kernels);
    return took_ms;
}

static void measure_copies(bench *b) {
    for (int64_t bytes = 256 * KIB; bytes <= BYTES_MAX; bytes *= 4)
        figure(gb_per_s(bytes, time_of(b, copy, bytes)), 1, "GB/s", "", "copy of %lld KiB", (long long)(bytes / KIB));
    figure(beside_kernel_ms(b, 4 * MIB), 2, "ms", "below 1: a copy engine does it; 15 or more: kernels must end first",
           "copy of 4096 KiB while a kernel holds all");
}

// --- streams ---

typedef struct queues {
    cf_stream *stream[STREAMS];
    int holders;     // streams that hold up others
    int independent; // so many, in the order made, do not hold up each other
} queues;

static bool is_busy(cf_stream *stream) {
    cudaError_t code = cudaStreamQuery(cf_cuda_stream(stream));
    if (code == cudaErrorNotReady) return true;
    CF_CUDA(code);
    return false;
}

static bool others_busy(const queues *q, int waiting) {
    for (int i = 0; i < STREAMS; i++)
        if (i != waiting && is_busy(q->stream[i])) return true;
    return false;
}

static void count_held_up(queues *q, int waiting) {
    bool holds = false;
    for (int i = 0; i < STREAMS; i++) {
        if (i == waiting || !is_busy(q->stream[i])) continue;
        int later = i > waiting ? i : waiting;
        if (later < q->independent) q->independent = later;
        holds = true;
    }
    q->holders += holds;
}

static void let_wait(bench *b, queues *q, int waiting, work *run) {
    close_gate(b, q->stream[waiting]);
    copy(b, q->stream[waiting], 4 * KIB);
    for (int i = 0; i < STREAMS; i++)
        if (i != waiting) run(b, q->stream[i], MIB);
    double begin_ms = cf_now_ms();
    while (others_busy(q, waiting) && cf_now_ms() - begin_ms < HELD_UP_MS) {}
    count_held_up(q, waiting);
    open_gate(b);
    for (int i = 0; i < STREAMS; i++) cf_stream_sync(q->stream[i]);
}

static void report_streams(bench *b, queues *q, work *run, const char *what) {
    q->holders = 0;
    q->independent = STREAMS;
    for (int i = 0; i < STREAMS; i++) let_wait(b, q, i, run);
    figure(q->holders, 0, "", "0", "streams of %d that hold up others' %s", STREAMS, what);
    figure(q->independent, 0, "", "29 or more: CUDA_DEVICE_MAX_CONNECTIONS - OTHER_STREAMS", "streams before the first that does");
}

static void measure_streams(bench *b) {
    queues q;
    q.stream[0] = cf_stream_create(); // as the model's kernels have
    q.stream[1] = b->stream;
    for (int i = 2; i < STREAMS; i++) q.stream[i] = cf_cuda_stream_urgent();
    report_streams(b, &q, kernel, "kernels");
    report_streams(b, &q, copy, "copies");
}

// --- run-ahead ---

typedef struct flood {
    bench *b;
    int taken, over; // atomic
} flood;

// The host may be stuck inside the CUDA library, so this thread calls nothing of it.
static void *open_when_stuck(void *argument) {
    flood *f = (flood *)argument;
    int before, now = 0;
    do {
        before = now;
        rest(STUCK_MS);
        now = __atomic_load_n(&f->taken, __ATOMIC_ACQUIRE);
    } while (now > before && now < FLOOD_MAX);
    __atomic_store_n(&f->over, 1, __ATOMIC_RELEASE);
    open_gate(f->b);
    return (void *)(intptr_t)now;
}

// Calls that return although the stream waits.
static int fit_behind_wait(bench *b, work *run) {
    flood f = {b, 0, 0};
    pthread_t thread;
    void *fit = NULL;
    close_gate(b, b->stream);
    int code = pthread_create(&thread, NULL, open_when_stuck, &f);
    if (code) cf_die(NULL, "cannot start a thread: %s", strerror(code));
    while (f.taken < FLOOD_MAX && !__atomic_load_n(&f.over, __ATOMIC_ACQUIRE)) {
        run(b, b->stream, MIB);
        __atomic_add_fetch(&f.taken, 1, __ATOMIC_RELEASE);
    }
    pthread_join(thread, &fit);
    cf_stream_sync(b->stream);
    return (int)(intptr_t)fit;
}

static void measure_run_ahead(bench *b) {
    static const char *const good = "768 or more: six for each of RUN_AHEAD = 128 requests";
    printf("  (%d: as good as no limit)\n", FLOOD_MAX);
    figure(fit_behind_wait(b, kernel), 0, "", good, "kernels that fit behind a wait");
    figure(fit_behind_wait(b, record), 0, "", good, "records of an event");
    figure(fit_behind_wait(b, write_scratch), 0, "", good, "writes of a word");
    figure(fit_behind_wait(b, copy), 0, "", good, "copies");
    figure(fit_behind_wait(b, chunk), 0, "", "128 or more: one for each request", "chunks (wait, copy, write)");
}

// --- chunks ---

static void measure_chunks(bench *b) {
    static const int64_t sizes[] = {0, 256 * KIB, MIB, 4 * MIB, 16 * MIB};
    for (int64_t bytes : sizes) {
        double us = time_of(b, chunk, bytes);
        figure(us, 2, "us", bytes ? "" : "words alone: small against the copy of a slice", "chunk of %lld KiB",
               (long long)(bytes / KIB));
        if (bytes > 0) figure(gb_per_s(bytes, us), 1, "GB/s", "twice the link's rate, or more", "    its rate");
    }
}

// --- the processes ---

typedef struct section {
    const char *name;
    void (*measure)(bench *b);
    int processes;
} section;

static void make_board(void) {
    void *memory = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) cf_die(NULL, "no memory for all processes: %s", strerror(errno));
    shared = (board *)memory;
}

// In a process of its own: it ends with its parent, or when its time is over.
CF_NORETURN static void measure(const section *s, int rank, int seconds) {
    static bench b;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm((unsigned)seconds);
    cf_die_setup(rank, s->processes, NULL);
    open_bench(&b, rank, s->processes);
    s->measure(&b);
    fflush(stdout);
    _exit(0);
}

// One that gave up has said why.
static void tell(const section *s, int status, int seconds) {
    if (!WIFSIGNALED(status)) return;
    if (WTERMSIG(status) == SIGALRM)
        fprintf(stderr,
                "\nerror: %s: not done within %d s\n"
                "hint:  what comes after the last figure above hangs\n",
                s->name, seconds);
    else
        fprintf(stderr,
                "\nerror: %s: ended by signal %d (%s)\n"
                "hint:  dmesg has the driver's own words\n",
                s->name, WTERMSIG(status), strsignal(WTERMSIG(status)));
}

static void end_all(const pid_t *child, int processes) {
    for (int i = 0; i < processes; i++)
        if (child[i] > 0) kill(child[i], SIGKILL);
}

// Waits for all, and for none in vain: where one has failed, it ends the other.
static bool all_succeed(const section *s, pid_t *child, int seconds) {
    bool well = true;
    for (int left = s->processes; left > 0; left--) {
        int status = 0;
        pid_t ended = waitpid(-1, &status, 0);
        if (ended < 0) cf_die(NULL, "%s: cannot wait for its processes: %s", s->name, strerror(errno));
        for (int i = 0; i < s->processes; i++)
            if (child[i] == ended) child[i] = 0;
        if (status == 0) continue;
        if (well) tell(s, status, seconds);
        well = false;
        end_all(child, s->processes);
    }
    return well;
}

static bool run_section(const section *s, int seconds) {
    pid_t child[PAIR] = {0, 0};
    printf("\n%s\n", s->name);
    fflush(stdout); // or each process would print it again
    memset(shared, 0, sizeof *shared);
    for (int i = 0; i < s->processes; i++) {
        child[i] = fork();
        if (child[i] == 0) measure(s, i, seconds);
        if (child[i] > 0) continue;
        int code = errno;
        end_all(child, i);
        while (waitpid(-1, NULL, 0) > 0) {}
        cf_die("allow this user more processes", "%s: cannot start a process: %s", s->name, strerror(code));
    }
    return all_succeed(s, child, seconds);
}

static const section sections[] = {
    {"the device", measure_device, 1}, {"two processes", measure_pair, PAIR}, {"copies", measure_copies, 1},
    {"streams", measure_streams, 1},   {"run-ahead", measure_run_ahead, 1},   {"chunks", measure_chunks, 1},
};

int main(int count, char **words) {
    if (count > 1) cf_die("it takes none", "bench_wires: what is %s?", words[1]);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", CONNECTIONS, 0);
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    setvbuf(stdout, NULL, _IOLBF, 0); // whoever ends a process finds the lines printed so far
    make_board();
    double begin_ms = cf_now_ms();
    int failed = 0;
    for (const section &s : sections) {
        int left_s = RUN_S - (int)((cf_now_ms() - begin_ms) / 1e3);
        bool well = left_s > 0 && run_section(&s, left_s < SECTION_S ? left_s : SECTION_S);
        if (left_s <= 0) fprintf(stderr, "\nerror: %s: not measured, %d s are over\n", s.name, RUN_S);
        failed += !well;
        if (!well && &s == sections) return 1; // without a device there is nothing to measure
    }
    if (failed > 0) cf_die("their messages say why", "sections not measured: %d", failed);
    return 0;
}
