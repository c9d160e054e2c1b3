# commfuse.c: `make help` lists the targets, `make config` prints what was found on this machine.
#
# Objects mirror the source tree under build/VARIANT/. Variants:
#   release        the CPU program and its tests; within, bf16 and layers64: the layers over bf16, and in double
#   san-…          the same with SAN=address,undefined or SAN=thread
#   cuda-bf16 -fp32  the GPU program, once for each element type (make cuda)
#   emulated-…     the same on the CPU, slow and exact (tests/emulator)
#   ref            the layers over plain loops

CC      ?= cc
PYTHON  ?= $(shell scripts/find_python.sh)
SAN     ?=
# The processor that programs are for; hosts that share them may need less than this one has: make MARCH=x86-64-v3
MARCH   ?= native
empty   :=
comma   := ,
variant := $(if $(SAN),san-$(subst $(comma),-,$(SAN)),release)
B       := build/$(variant)

# NVCC, CUDA_INCLUDES, CUDA_LIBS, CUDA_ARCH: empty unless all of CUDA, cuBLAS, cuDNN and NCCL are here.
$(eval $(shell PYTHON='$(PYTHON)' scripts/find_cuda.sh make))

# The C subset that nvcc must also take: -Wc++-compat keeps it honest for train_gpt.cu and every header.
# make WERROR= for a compiler that warns of more than those that this was written with.
WERROR  := -Werror
WARN    := -Wall -Wextra $(WERROR) -Wshadow -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes -Wvla
# clang warns of every loop that it cannot vectorise though it was asked to; gcc does not know the word, and says nothing.
WARN    += -Wno-pass-failed
# Errno and traps are not looked at, so exp() and friends can be vectorised; NaN and infinity keep their meaning.
OPT     := -O3 -march=$(MARCH) -fno-math-errno -fno-trapping-math
OMP     := -fopenmp
ifneq ($(SAN),)
OPT     := -O1 -march=$(MARCH) -fno-math-errno -fno-trapping-math -fno-omit-frame-pointer -fsanitize=$(SAN) -fno-sanitize-recover=all
endif
ifneq ($(findstring thread,$(SAN)),)
# libgomp's synchronisation is invisible to the thread sanitizer, so that build has no OpenMP.
OMP     := -fopenmp-simd
endif
MPI_CFLAGS := $(shell mpicc --showme:compile 2>/dev/null || mpicc -compile_info 2>/dev/null | cut -d' ' -f2-)
MPI_LIBS   := $(shell mpicc --showme:link 2>/dev/null || mpicc -link_info 2>/dev/null | cut -d' ' -f2-)
CFLAGS  += -std=gnu11 -g $(OPT) $(OMP) $(WARN)
# What `scripts/install_deps.sh --carry` has copied for machines without network goes before the system's.
DEPS    := build/deps
VERSION := $(shell git describe --always --dirty 2>/dev/null || cat $(DEPS)/version 2>/dev/null || echo unknown)
CJSON   := -lcjson
CRYPTO  := -lcrypto
ifneq ($(wildcard $(DEPS)/include),)
export CPATH := $(CURDIR)/$(DEPS)/include$(if $(CPATH),:$(CPATH))
CARRIED := -L$(DEPS)/lib -Xlinker -rpath='$(subst ','\'',$(CURDIR))/$(DEPS)/lib'
CJSON   := $(CARRIED) $(CJSON)
CRYPTO  := $(CARRIED) $(CRYPTO)
endif
LIBS    := -ldnnl $(CJSON) $(CRYPTO) $(MPI_LIBS) -lpthread -lm

commfuse := $(patsubst %.c,$(B)/%.o,$(wildcard commfuse/*.c))
gemm_bf16 := $(wildcard layers/gemm_bf16*.c)
# What GPUs have no use for, beside the twins of what is theirs.
cpu_alone := $(addprefix commfuse/,device_cpu.c transport_mpi.c flights_mpi.c) $(wildcard layers/gemm*.c)
layers   := $(patsubst %.c,$(B)/%.o,$(filter-out layers/gemm_ref.c $(gemm_bf16),$(wildcard layers/*.c)))
data     := $(patsubst %.c,$(B)/%.o,$(wildcard data/*.c))
program  := $(commfuse) $(layers) $(data)
# The same layers over elements of bf16.
layers16 := $(patsubst layers/%.c,$(B)/bf16/layers/%.o,$(filter-out layers/gemm_ref.c,$(wildcard layers/*.c)))
# The same layers in double precision over the reference GEMM, for the gradient tests.
layers64 := $(patsubst layers/%.c,$(B)/layers64/%.o,$(filter-out layers/gemm.c $(gemm_bf16),$(wildcard layers/*.c)))

test_sources := $(wildcard tests/*/test_*.c)
grad_sources := $(wildcard tests/*/gradient_*.c)
half_sources := $(wildcard tests/*/test_*_bf16.c)
tool_sources := $(wildcard tests/*/tool_*.c)
tests := $(patsubst %.c,$(B)/%,$(test_sources) $(grad_sources))
tools := $(patsubst %.c,$(B)/%,$(tool_sources))
benches := $(patsubst %.c,$(B)/%,$(wildcard tests/bench/bench_*.c))

ifeq ($(SAN),)
all: train_gpt train_gpt_bf16 compile_commands.json ## build ./train_gpt, and its bf16 form beside it (the default)
train_gpt train_gpt_bf16: %: $(B)/%
	cp -f $< $@
else
all: $(B)/train_gpt $(B)/train_gpt_bf16
endif

$(B)/train_gpt: $(B)/train_gpt.o $(program)
	$(CC) $(CFLAGS) -o $@ $^ $(LIBS)
$(B)/train_gpt_bf16: $(B)/train_gpt_bf16.o $(commfuse) $(layers16) $(data)
	$(CC) $(CFLAGS) -o $@ $^ $(LIBS)

# train_gpt.cu is C when cc compiles it and C++ when nvcc does.
$(B)/train_gpt.o: OTHER := -DOTHER_PROGRAM='"train_gpt_bf16"'
$(B)/train_gpt_bf16.o: OTHER := -DREAL_IS_BF16 -DOTHER_PROGRAM='"train_gpt"'
$(B)/train_gpt.o $(B)/train_gpt_bf16.o: train_gpt.cu $(B)/version build/march
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -Wc++-compat -DVERSION='"$(VERSION)"' $(OTHER) -MMD -MP -x c -c -o $@ $<

# Changes only when the version does, so that the program always tells the one it was built from.
$(B)/version: FORCE
	@mkdir -p $(@D)
	@echo '$(VERSION)' | cmp -s - $@ || echo '$(VERSION)' > $@

# Likewise: what was compiled for another processor is compiled again, not linked with the rest.
build/march: FORCE
	@mkdir -p $(@D)
	@echo '$(MARCH)' | cmp -s - $@ || echo '$(MARCH)' > $@

# And for another MPI library: its types and constants are its own. What is linked with these is linked again.
with_mpi := $(addprefix $(B)/commfuse/,transport_mpi.o flights_mpi.o) \
            $(foreach kind,$(notdir $(B)) cuda-bf16 cuda-fp32 emulated-bf16 emulated-fp32,build/$(kind)/commfuse/bootstrap_mpi.o)
$(with_mpi): build/mpi
build/mpi: FORCE
	@mkdir -p $(@D)
	@echo '$(MPI_CFLAGS) $(MPI_LIBS)' | cmp -s - $@ || echo '$(MPI_CFLAGS) $(MPI_LIBS)' > $@

$(B)/commfuse/transport_mpi.o $(B)/commfuse/flights_mpi.o: CFLAGS += $(MPI_CFLAGS)
$(B)/tests/bench/bench_collectives: CFLAGS += $(MPI_CFLAGS)
%/commfuse/bootstrap_mpi.o: CFLAGS += $(MPI_CFLAGS) $(if $(MPI_LIBS),-DCF_WITH_MPI)
$(B)/%.o: %.c build/march
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<
$(B)/layers64/%.o: layers/%.c build/march
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -DREAL_IS_DOUBLE -MMD -MP -c -o $@ $<
$(B)/bf16/%.o: %.c build/march
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -DREAL_IS_BF16 -MMD -MP -c -o $@ $<

# From an archive a test gets what it uses, and of the libraries those that this uses: where nothing of MPI is among it, the
# test does not wait for MPI's libraries to start (Open MPI 5: 0.17 s, and the tests of files start thousands of times).
$(B)/program.a: $(program)
	rm -f $@
	$(AR) rcs $@ $^
$(B)/tests/%: tests/%.c $(B)/program.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP -I. -o $@ $< $(B)/program.a -lcmocka -Wl,--as-needed $(LIBS)
$(patsubst %.c,$(B)/%,$(grad_sources)): $(B)/tests/%: tests/%.c $(commfuse) $(layers64)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -DREAL_IS_DOUBLE -MMD -MP -I. -o $@ $< $(commfuse) $(layers64) -lcmocka $(LIBS)
$(patsubst %.c,$(B)/%,$(half_sources)): $(B)/tests/%: tests/%.c $(commfuse) $(layers16)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -DREAL_IS_BF16 -MMD -MP -I. -o $@ $< $(commfuse) $(layers16) -lcmocka $(LIBS)

$(B)/bf16/tests/%: tests/%.c $(commfuse) $(layers16) $(data)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -DREAL_IS_BF16 -MMD -MP -I. -o $@ $< $(commfuse) $(layers16) $(data) $(LIBS)
bf16-tools: $(addprefix $(B)/bf16/tests/,layers/tool_twins layers/tool_gradients bench/bench_train)

# --- the layers' twins with no library at all, for machines that have a GPU and little else ---

reference := $(addprefix commfuse/,device_cpu.c memory.c die.c) layers/gemm_ref.c layers/random.c \
             $(addprefix layers/,adamw.c attention.c crossentropy.c elementwise.c embedding.c layernorm.c linear.c)
build/ref/tests/layers/tool_twins: tests/layers/tool_twins.c $(reference:%.c=build/ref/%.o)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP -I. -o $@ $^ -lpthread -lm
build/ref/%.o: %.c build/march
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<
-include $(shell find build/ref -name '*.d' 2>/dev/null)

# --- the GPU program without a GPU: what tests run ---

include tests/emulator/emulator.mk
include tests/fuzz/fuzz.mk

# --- the GPU program: twins of the device, of the transports and of the layers; all else is the same source ---

NVCCFLAGS := -std=c++17 -O3 -lineinfo $(CUDA_ARCH) -Xcompiler -Wall,-Wextra -Xptxas --warn-on-spills \
             $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror -Xptxas --warning-as-error)
cuda_sources := $(wildcard commfuse/*.cu layers/*.cu)
twinned := $(cuda_sources:%.cu=%.c) $(cpu_alone)
shared_sources := $(filter-out $(twinned),$(wildcard commfuse/*.c layers/*.c))
data_objects := $(patsubst %.c,%.o,$(wildcard data/*.c)) # what needs cJSON and xxHash, which layers do without
gpu_objects := $(cuda_sources:%.cu=%.cuda.o) $(shared_sources:%.c=%.o)
device_objects := commfuse/device_cuda.cuda.o commfuse/memory.o commfuse/die.o
real_bf16 := -DREAL_IS_BF16
name_bf16 := train_gpt_cuda
name_fp32 := train_gpt_cuda_fp32

cuda: $(name_bf16) $(name_fp32) ## build ./train_gpt_cuda for NVIDIA GPUs (bf16), and its fp32 form beside it
bench_cuda := $(addprefix build/cuda-bf16/tests/bench/bench_,train gpu wires)
bench-cuda: $(bench_cuda) ## build the GPU program's benchmarks: training steps, kernels, what transports rely on
ifeq ($(NVCC),)
$(name_bf16) $(name_fp32) $(bench_cuda):
	@echo "make $@: something is missing"; scripts/find_cuda.sh report; exit 1
endif

# gpu_variant TYPE, OTHER TYPE
define gpu_variant
build/cuda-$(1)/%.o: %.c build/march
	@mkdir -p $$(@D)
	$$(CC) $$(CFLAGS) $$(real_$(1)) -MMD -MP -c -o $$@ $$<
build/cuda-$(1)/%.cuda.o: %.cu
	@mkdir -p $$(@D)
	$$(NVCC) $$(NVCCFLAGS) $$(CUDA_INCLUDES) $$(real_$(1)) -MMD -MP -c -o $$@ $$<
build/cuda-$(1)/train_gpt.o: train_gpt.cu $$(B)/version
	@mkdir -p $$(@D)
	$$(NVCC) $$(NVCCFLAGS) $$(CUDA_INCLUDES) $$(real_$(1)) -DVERSION='"$$(VERSION)"' -DOTHER_PROGRAM='"$$(name_$(2))"' -MMD -MP -c -o $$@ $$<
build/cuda-$(1)/train_gpt: build/cuda-$(1)/train_gpt.o $$(patsubst %,build/cuda-$(1)/%,$$(gpu_objects) $$(data_objects))
	$$(NVCC) -Xcompiler -fopenmp -o $$@ $$^ $$(CUDA_LIBS) $$(CJSON) $$(CRYPTO) $$(MPI_LINK) -lpthread -lm
build/cuda-$(1)/tests/%: tests/%.c $$(gpu_objects:%=build/cuda-$(1)/%)
	@mkdir -p $$(@D)
	$$(CC) $$(CFLAGS) $$(real_$(1)) -MMD -MP -I. -c -o $$@.o $$<
	$$(NVCC) -Xcompiler -fopenmp -o $$@ $$@.o $$(filter %.o,$$^) $$(CUDA_LIBS) $$(DATA_LIBS) $$(CRYPTO) $$(MPI_LINK) -lpthread -lm
build/cuda-$(1)/tests/bench/bench_train: $$(data_objects:%=build/cuda-$(1)/%)
build/cuda-$(1)/tests/bench/bench_train: DATA_LIBS := $$(CJSON)
# What measures the device needs no more than the device.
build/cuda-$(1)/tests/%: tests/%.cu $$(device_objects:%=build/cuda-$(1)/%)
	@mkdir -p $$(@D)
	$$(NVCC) $$(NVCCFLAGS) $$(CUDA_INCLUDES) $$(real_$(1)) -MMD -MP -MT $$@ -I. -c -o $$@.o $$<
	$$(NVCC) -o $$@ $$@.o $$(filter %.o,$$^) $$(TOOL_LIBS) -lpthread
ifneq ($$(NVCC),)
$$(name_$(1)): build/cuda-$(1)/train_gpt
	cp -f $$< $$@
endif
-include $$(shell find build/cuda-$(1) -name '*.d' 2>/dev/null)
endef
# nvcc does not know the options of compilers that MPI's wrappers give.
MPI_LINK := $(patsubst -Wl$(comma)%,-Xlinker %,$(filter -L% -l% -Wl$(comma)%,$(MPI_LIBS)))
$(eval $(call gpu_variant,bf16,fp32))
$(eval $(call gpu_variant,fp32,bf16))
.SECONDARY:
# Asks cuDNN about GPUs that are not here, with a stand-in for their driver.
build/cuda-bf16/tests/cuda/tool_plans: TOOL_LIBS := $(CUDA_LIBS) -ldl
build/cuda-bf16/tests/cuda/driver/libcuda.so.1: tests/cuda/driver.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -shared -fPIC -o $@ $<
cuda-tests: $(if $(NVCC),cuda cuda-tools)
cuda-tools: bench-cuda $(foreach tool,tests/layers/tool_twins tests/cuda/tool_plans tests/cuda/driver/libcuda.so.1,\
                                   build/cuda-bf16/$(tool))
emulated-tests: emulated emulated-tools
emulated-tools: $(foreach type,fp32 bf16,build/emulated-$(type)/tests/layers/tool_twins) \
                $(foreach tool,silent_peer moments messages,build/emulated-fp32/tests/commfuse/tool_$(tool)) \
                build/emulated-bf16/tests/bench/bench_train

-include $(shell find $(B) -name '*.d' 2>/dev/null)

build-tests: all $(tests) $(tools) $(benches) bf16-tools $(if $(SAN),,emulated-tests cuda-tests) ## build everything that tests run
tests: build-tests

test: ## the essential tests; all: make test ALL=1   one alone: make test T=fuse   sanitizers: make test SAN=address,undefined
	@scripts/test.sh $(if $(ALL),--all) $(if $(T),--only '$(T)') $(if $(SAN),--san '$(SAN)')

bench: all $(benches) ## benchmarks: share of the GEMM peak, hidden share of the fused operations
	@$(PYTHON) tests/bench/run.py --build $(B)

imagined: build/emulated-bf16/tests/bench/bench_train ## steps of the GPU program on four and eight GPUs that are imagined (five to ten minutes)
	@$(PYTHON) tests/bench/imagined.py

report: all $(benches) ## run the experiments that fit, write build/report/report.md; QUICK=1: under five minutes; PATIENCE=4: longer, smaller errors
	@$(PYTHON) scripts/report.py $(if $(filter-out 0,$(QUICK)),--quick) $(if $(PATIENCE),--patience '$(PATIENCE)') $(if $(ONLY),--only '$(ONLY)')

lab: all $(benches) ## the same experiments on two hosts made of one machine, over links of known speed (Linux, root)
	@scripts/lab.py --plan && $(PYTHON) scripts/report.py --place lab --out build/lab $(if $(filter-out 0,$(QUICK)),--quick) $(if $(PATIENCE),--patience '$(PATIENCE)') $(if $(ONLY),--only '$(ONLY)')

soak: all ## what needs hours: a thousand steps with a hundred ranks killed, fifty ranks frozen, the parsers fuzzed (clang)
	$(PYTHON) tests/train/chaos.py
	FREEZES=50 $(PYTHON) tests/train/test_freeze.py
	$(MAKE) --no-print-directory fuzz

demo: ## train a small GPT on two ranks for a few minutes, with text, figures and a plot
	@scripts/demo.sh

deps: ## install what is missing (as root or through sudo)
	@scripts/install_deps.sh

config: ## what was found on this machine
	@echo "compiler     $(CC): $$($(CC) --version | head -1)"
	@echo "flags        $(CFLAGS)"
	@echo "processor    $(MARCH), for others: make MARCH=x86-64-v3, or what $(CC) -march takes"
	@echo "mpi          $$(mpirun --version 2>/dev/null | head -2 | tr -s ' \n' ' ')[$(if $(MPI_LIBS),mpicc links$(foreach l,$(filter -l%,$(MPI_LIBS)), $l),missing: scripts/install_deps.sh)]"
	@echo "oneDNN       $$(printf '#include <dnnl.h>\n' | $(CC) -E -x c - >/dev/null 2>&1 && echo found || echo missing: scripts/install_deps.sh)"
	@echo "cJSON        $$(printf '#include <cjson/cJSON.h>\n' | $(CC) -E -x c - >/dev/null 2>&1 && echo found || echo missing: scripts/install_deps.sh)"
	@echo "OpenSSL      $$(printf '#include <openssl/hmac.h>\n' | $(CC) -E -x c - >/dev/null 2>&1 && echo found || echo missing: scripts/install_deps.sh)"
	@echo "xxHash       $$(printf '#include <xxhash.h>\n' | $(CC) -E -x c - >/dev/null 2>&1 && echo found || echo missing: scripts/install_deps.sh)"
	@echo "cmocka       $$(printf '#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <setjmp.h>\n#include <cmocka.h>\n' | $(CC) -E -x c - >/dev/null 2>&1 && echo found || echo missing: scripts/install_deps.sh)"
	@echo "python       $(PYTHON): $$($(PYTHON) -c 'import sys, numpy, matplotlib; print(sys.version.split()[0], "numpy", numpy.__version__, "matplotlib", matplotlib.__version__)' 2>/dev/null || echo 'numpy or matplotlib missing: scripts/install_deps.sh')"
	@scripts/find_cuda.sh report
	@echo "cores        $$(nproc)"
	@echo "build        $(B), version $(VERSION)"

compile_commands.json: Makefile scripts/compile_commands.py $(wildcard */*.c tests/*/*.c)
	@$(PYTHON) scripts/compile_commands.py '$(CC) $(CFLAGS) $(MPI_CFLAGS) -I.' train_gpt.cu $(wildcard */*.c tests/*/*.c) > $@

lint: compile_commands.json ## clang-tidy over every C file of the program: .clang-tidy says which checks
	@scripts/install_deps.sh --lint
	@echo train_gpt.cu commfuse/*.c layers/*.c data/*.c | xargs -n 1 -P "$$(nproc)" clang-tidy --quiet -p . \
	    --extra-arg=-DXXH_DEBUGLEVEL=1 2>/dev/null # xxHash asserts then that its input is there, which the analyzer reads

formatted = $(wildcard train_gpt.cu */*.h */*.c */*.cu tests/*/*.c tests/*/*.cu tests/*/*.h tests/*/*.cc)
format: ## clang-format every C and CUDA file
	@clang-format -i $(formatted)
format-check: ## say what `make format` would change
	@clang-format --dry-run --Werror $(formatted)

clean: ## remove everything that was built
	rm -rf build train_gpt train_gpt_bf16 $(name_bf16) $(name_fp32) compile_commands.json

help: ## this list
	@grep -hE '^[a-z_-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z_-]+):.*## /  make \1\t/' | expand -t 20

.PHONY: FORCE all cuda bench-cuda cuda-tools cuda-tests emulated-tools emulated-tests bf16-tools build-tests tests test bench imagined report lab soak lint demo deps config format format-check clean help
.DELETE_ON_ERROR:
