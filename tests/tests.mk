# Tests, their tools, and benchmarks. Included by the Makefile.

test: ## the essential tests; all: make test ALL=1   one alone: make test T=fuse   sanitizers: make test SAN=address,undefined
	@scripts/test.sh $(if $(ALL),--all) $(if $(T),--only '$(T)') $(if $(SAN),--san '$(SAN)')

include tests/emulator/emulator.mk tests/fuzz/fuzz.mk

# $(call all_named,PATTERN): programs of the folders and of their rooms
all_named = $(patsubst %.c,$(B)/%,$(wildcard tests/*/$(1).c tests/*/*/$(1).c))
half_tests := $(call all_named,test_*_bf16)
grad_tests := $(call all_named,gradient_*)
tests   := $(call all_named,test_*) $(grad_tests)
tools   := $(call all_named,tool_*)
benches := $(call all_named,bench_*)
# The layers in double precision over the reference GEMM, for the gradient tests.
layers64 := $(patsubst %.c,$(B)/layers64/%.o,tests/layers/kernels/gemm_ref.c $(filter-out layers/kernels/gemm%.c,$(layers_c)))

# $(call build_test,MORE FLAGS,LIBRARIES): of one source, and of objects and archives
define build_test
@mkdir -p $(@D)
$(CC) $(FLAGS) $(MPI_FLAGS) $(1) -MMD -MP -I. $(LDFLAGS) -o $@ $< $(filter %.o %.a,$^) $(2) $(libs)
endef
# From an archive a test gets what it uses, and of the libraries those that this uses: where nothing of MPI is among it, the
# test does not wait for MPI's libraries to start (Open MPI 5: 0.17 s, and the tests of files start thousands of times).
$(B)/program.a: $(program)
	rm -f $@
	$(AR) rcs $@ $^
$(B)/tests/%: tests/%.c $(B)/program.a
	$(call build_test,,-lcmocka -Wl$(comma)--as-needed)
$(grad_tests): $(B)/tests/%: tests/%.c $(commfuse) $(layers64)
	$(call build_test,-DREAL_IS_DOUBLE,-lcmocka)
$(half_tests): $(B)/tests/%: tests/%.c $(commfuse) $(layers16)
	$(call build_test,-DREAL_IS_BF16,-lcmocka)
$(B)/bf16/tests/%: tests/%.c $(commfuse) $(layers16) $(data)
	$(call build_test,-DREAL_IS_BF16)
$(B)/layers64/%.o: %.c build/machine
	$(call compile,-DREAL_IS_DOUBLE)
$(B)/tests/bench/bench_collectives: MPI_FLAGS := $(MPI_CFLAGS)

# The layers' twins with no library at all, for machines that have a GPU and little else.
reference := $(addprefix commfuse/,cpu/device_cpu.c memory.c base/die.c base/host.c base/streams.c base/limits.c) tests/layers/kernels/gemm_ref.c layers/random.c layers/optimizer/optimizers.c \
             $(filter-out layers/kernels/peak.c,$(wildcard $(patsubst %.cu,%.c,$(wildcard layers/*/*.cu))))
build/ref/tests/layers/kernels/tool_twins: tests/layers/kernels/tool_twins.c $(reference:%.c=build/ref/%.o)
	@mkdir -p $(@D)
	$(CC) $(FLAGS) -MMD -MP -I. $(LDFLAGS) -o $@ $(filter %.c %.o,$^) -lpthread -lm
build/ref/%.o: %.c build/machine
	$(call compile)

# Benchmarks of the GPU alone.
device_objects := $(addprefix commfuse/,gpu/device_cuda.cuda.o memory.o base/die.o base/host.o base/limits.o base/streams.o)
build/cuda-bf16/tests/%: tests/%.cu $(device_objects:%=build/cuda-bf16/%)
	@mkdir -p $(@D)
	$(NVCC) $(nvcc_flags) $(real_bf16) -MMD -MP -MT $@ -I. -c -o $@.o $<
	$(NVCC) -Xcompiler -fopenmp -o $@ $@.o $(filter %.o,$^) $(TOOL_LIBS) -lpthread
# Two ask libraries for their versions; tool_plans queries cuDNN about GPUs that are not here, with a replacement for the driver.
$(addprefix build/cuda-bf16/tests/bench/bench_,beside wires): TOOL_LIBS := $(CUDA_LIBS)
build/cuda-bf16/tests/cuda/tool_plans: TOOL_LIBS := $(CUDA_LIBS) -ldl
build/cuda-bf16/tests/cuda/driver/libcuda.so.1: tests/cuda/driver.c
	@mkdir -p $(@D)
	$(CC) $(FLAGS) -shared -fPIC -o $@ $<

bf16-tools: $(addprefix $(B)/bf16/tests/,layers/kernels/tool_twins layers/tool_gradients bench/bench_layers bench/bench_train)
cuda-tests: $(if $(NVCC),cuda cuda-tools)
cuda-tools: bench-cuda $(foreach tool,tests/layers/kernels/tool_twins tests/cuda/tool_plans tests/cuda/driver/libcuda.so.1,\
                                   build/cuda-bf16/$(tool))
emulated-tests: emulated emulated-tools
emulated-tools: $(foreach type,fp32 bf16,build/emulated-$(type)/tests/layers/kernels/tool_twins) \
                $(foreach tool,silent_peer events messages,build/emulated-fp32/tests/commfuse/tool_$(tool)) \
                $(addprefix build/emulated-bf16/tests/bench/bench_,train gpu)
build-tests: all $(tests) $(tools) $(benches) bf16-tools $(if $(SAN),,emulated-tests cuda-tests) ## build everything that tests run
tests: build-tests

bench: all $(benches) $(B)/bf16/tests/bench/bench_layers ## benchmarks: share of the GEMM peak, hidden share of the fused operations
	@$(PYTHON) tests/bench/run.py --build $(B)
imagined: build/emulated-bf16/tests/bench/bench_train ## steps of the GPU program on four and eight GPUs that are imagined (five to ten minutes)
	@$(PYTHON) tests/bench/imagined.py
soak: all ## what needs hours: a thousand steps with a hundred ranks killed, fifty ranks frozen, the parsers fuzzed (clang)
	$(PYTHON) tests/train/chaos.py
	FREEZES=50 $(PYTHON) tests/train/test_freeze.py
	$(MAKE) --no-print-directory fuzz

.PHONY: test tests build-tests bf16-tools cuda-tests cuda-tools emulated-tests emulated-tools bench imagined soak
