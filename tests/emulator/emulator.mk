# The GPU program without a GPU: the same .cu files by g++ against the emulator's headers, linked to its library.
#
#     make emulated                build/emulated-fp32/train_gpt and build/emulated-bf16/train_gpt
#     make emulated SAN=thread     with a sanitizer, in build/emulated-fp32-san-thread/ …
#     build/emulated-fp32/tests/emulator/test_emulator     the emulator's own test
#
# Included by the Makefile. Sources are found by wildcard; a .c file with a .cu twin gives way to it. cuDNN is
# not emulated: compiled without it, attention_cudnn.cu says "not supported".
# SAN=alignment: misaligned packs, which fault on a GPU, are reported.

CXX     ?= g++
MARCH   ?= native
CJSON   ?= -lcjson
CRYPTO  ?= -lcrypto
VERSION ?= $(shell git describe --always --dirty 2>/dev/null || echo unknown)
emulated_suffix := $(if $(SAN),-san-$(shell echo '$(SAN)' | tr , -))
emulated_optimise := $(if $(SAN),-O1 -fno-omit-frame-pointer -fsanitize=$(SAN) -fno-sanitize-recover=all,-O2)
emulated_flags := -g -march=$(MARCH) -fno-math-errno -fno-trapping-math $(emulated_optimise) -Wall -Wextra -Werror -Wshadow
# No OpenMP in the thread sanitizer's build: it does not see libgomp's synchronisation.
emulated_openmp := $(if $(findstring thread,$(SAN)),-fopenmp-simd,-fopenmp)
emulated_c  := $(emulated_flags) -std=gnu11 $(emulated_openmp)
emulated_cu := $(emulated_flags) -std=gnu++17 -fno-strict-aliasing -fopenmp-simd -x c++ -D__CUDACC__ -Itests/emulator/include \
               -Wno-shadow -Wno-unknown-pragmas -Wno-missing-field-initializers -Wno-unused-function

emulated_cuda    := $(wildcard commfuse/*.cu layers/*.cu)
emulated_twinned := $(emulated_cuda:%.cu=%.c) $(cpu_alone)
emulated_shared  := $(filter-out $(emulated_twinned),$(wildcard commfuse/*.c layers/*.c data/*.c))
emulated_library := $(filter-out tests/emulator/test_% tests/emulator/layers.cc,$(wildcard tests/emulator/*.cc))
emulated_objects := $(emulated_cuda:%.cu=%.cuda.o) $(emulated_shared:%.c=%.o) $(emulated_library:%.cc=%.o) tests/emulator/layers.o
# What clock.cc and layers.cc stand before.
emulated_wraps  := -Wl,--wrap=clock_gettime,--wrap=nanosleep,--wrap=sched_yield
emulated_linked := $(emulated_wraps),--wrap=attention_cudnn_forward,--wrap=attention_cudnn_backward,--wrap=linear_wgrad_rows_min,--wrap=linear_wgrad_depth_min,--wrap=random_normal
emulated_real_bf16 := -DREAL_IS_BF16

emulated: emulated-fp32 emulated-bf16

# emulated_variant TYPE, DIRECTORY
define emulated_variant
emulated-$(1): $(2)/train_gpt $(2)/tests/emulator/test_emulator
$(2)/%.o: %.c build/march
	@mkdir -p $$(@D)
	$$(CC) $$(emulated_c) $$(emulated_real_$(1)) -MMD -MP -c -o $$@ $$<
$(2)/commfuse/bootstrap_mpi.o: emulated_c += $$(MPI_CFLAGS) $$(if $$(MPI_LIBS),-DCF_WITH_MPI)
$(2)/%.cuda.o: %.cu build/march
	@mkdir -p $$(@D)
	$$(CXX) $$(emulated_cu) $$(emulated_real_$(1)) -MMD -MP -c -o $$@ $$<
$(2)/tests/emulator/%.o: tests/emulator/%.cc build/march
	@mkdir -p $$(@D)
	$$(CXX) $$(emulated_cu) $$(emulated_real_$(1)) -O3 -MMD -MP -c -o $$@ $$<
$(2)/train_gpt.o: train_gpt.cu build/march
	@mkdir -p $$(@D)
	$$(CXX) $$(emulated_cu) $$(emulated_real_$(1)) -DVERSION='"$$(VERSION)"' -DOTHER_PROGRAM='"the other one"' -MMD -MP -c -o $$@ $$<
$(2)/train_gpt: $(2)/train_gpt.o $$(emulated_objects:%=$(2)/%)
	$$(CXX) $$(emulated_optimise) $$(emulated_openmp) $$(emulated_linked) -o $$@ $$^ $$(CJSON) $$(CRYPTO) $$(MPI_LIBS) -lpthread -lm
$(2)/tests/emulator/test_emulator: $(2)/tests/emulator/test_emulator.o \
                                   $$(patsubst %.cc,$(2)/%.o,$$(emulated_library))
	$$(CXX) $$(emulated_optimise) $$(emulated_wraps) -o $$@ $$^ -lpthread -lm
# Any cmocka test of the layers or the executor, over the emulator.
$(2)/tests/%: tests/%.c $$(emulated_objects:%=$(2)/%)
	@mkdir -p $$(@D)
	$$(CC) $$(emulated_c) $$(emulated_real_$(1)) -MMD -MP -I. -c -o $$@.o $$<
	$$(CXX) $$(emulated_optimise) $$(emulated_openmp) $$(emulated_linked) -o $$@ $$@.o $$(filter %.o,$$^) -lcmocka $$(CJSON) $$(CRYPTO) $$(MPI_LIBS) -lpthread -lm
-include $$(shell find $(2) -name '*.d' 2>/dev/null)
endef
$(eval $(call emulated_variant,fp32,build/emulated-fp32$(emulated_suffix)))
$(eval $(call emulated_variant,bf16,build/emulated-bf16$(emulated_suffix)))

.PHONY: emulated emulated-fp32 emulated-bf16
.SECONDARY:
