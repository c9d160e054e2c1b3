# The GPU program: .cu twins of device, transports and layers; all other sources are the CPU program's. Included by the Makefile.

# Sets NVCC, CUDA_INCLUDES, CUDA_LIBS and CUDA_ARCH; empty unless all of CUDA, cuBLAS, cuDNN and NCCL are found.
$(eval $(shell PYTHON='$(PYTHON)' scripts/find_cuda.sh make))

cuda_sources := $(wildcard commfuse/gpu/*.cu layers/*/*.cu)
shared_sources := $(filter-out $(cuda_sources:%.cu=%.c) $(cpu_alone),$(core) $(layers_c))
gpu_objects  := $(cuda_sources:%.cu=%.cuda.o) $(shared_sources:%.c=%.o)
data_objects := $(patsubst %.c,%.o,$(wildcard data/*.c data/run/*.c)) # need cJSON and xxHash; layers do not
real_bf16 := -DREAL_IS_BF16

# gpu_variant DIRECTORY, TYPE, FAMILY: the program (of FAMILY_objects and FAMILY_data) and its tests (of FAMILY_objects), compiled
# with FAMILY_cc and FAMILY_cxx, linked with FAMILY_link and FAMILY_libs.
define gpu_variant
$(1)/%.o: %.c build/machine
	@mkdir -p $$(@D)
	$$($(3)_cc) $$(MPI_FLAGS) $$(real_$(2)) -MMD -MP -c -o $$@ $$<
$(1)/%.cuda.o: %.cu build/machine
	@mkdir -p $$(@D)
	$$($(3)_cxx) $$(real_$(2)) -MMD -MP -c -o $$@ $$<
$(1)/train_gpt.o: train_gpt.cu build/machine $$($(3)_version)
	@mkdir -p $$(@D)
	$$($(3)_cxx) $$(real_$(2)) -DVERSION='"$$(VERSION)"' -DOTHER_PROGRAM='"$$(name_$(filter-out $(2),bf16 fp32))"' -MMD -MP -c -o $$@ $$<
$(1)/train_gpt: $$(patsubst %,$(1)/%,train_gpt.o $$($(3)_objects) $$($(3)_data))
	$$($(3)_link) -o $$@ $$^ $$(CJSON) $$($(3)_libs)
$(1)/tests/%: tests/%.c $$($(3)_objects:%=$(1)/%)
	@mkdir -p $$(@D)
	$$($(3)_cc) $$(real_$(2)) -MMD -MP -I. -c -o $$@.o $$<
	$$($(3)_link) -o $$@ $$@.o $$(filter %.o,$$^) $$($(3)_test_libs) $$($(3)_libs)
$(1)/tests/bench/bench_train: $$($(3)_data:%=$(1)/%)
$(1)/tests/bench/bench_train: $(3)_test_libs := $$(CJSON)
endef

# nvcc rejects the other options that MPI's wrappers print.
link_by_nvcc = $(patsubst -Wl$(comma)%,-Xlinker %,$(filter -L% -l% -Wl$(comma)%,$(1)))
nvcc_flags = -std=c++17 -O3 -lineinfo $(DEFINE) $(CUDA_ARCH) -Xcompiler -Wall,-Wextra -Xptxas --warn-on-spills \
             $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror -Xptxas --warning-as-error) $(CUDA_INCLUDES) $(NVCCFLAGS)
cuda_objects := $(gpu_objects)
cuda_data    := $(data_objects)
cuda_version := $(B)/version
cuda_cc      = $(CC) $(FLAGS)
cuda_cxx     = $(NVCC) $(nvcc_flags)
cuda_link    = $(NVCC) -Xcompiler -fopenmp $(call link_by_nvcc,$(LDFLAGS))
cuda_libs    = $(CUDA_LIBS) $(call link_by_nvcc,$(MPI_LIBS) $(LDLIBS)) -lpthread -lm
$(eval $(call gpu_variant,build/cuda-bf16,bf16,cuda))
$(eval $(call gpu_variant,build/cuda-fp32,fp32,cuda))

name_bf16 := train_gpt_cuda
name_fp32 := train_gpt_cuda_fp32
bench_cuda := $(addprefix build/cuda-bf16/tests/bench/bench_,train gpu wires beside)
cuda: $(name_bf16) $(name_fp32) ## build ./train_gpt_cuda for NVIDIA GPUs (bf16), and its fp32 form beside it
bench-cuda: $(bench_cuda) ## build the GPU program's benchmarks: training steps, kernels, what transports rely on
ifeq ($(NVCC),)
$(name_bf16) $(name_fp32) $(bench_cuda):
	@echo "make $@: something is missing"; scripts/find_cuda.sh report; exit 1
else
$(name_bf16): build/cuda-bf16/train_gpt
$(name_fp32): build/cuda-fp32/train_gpt
$(name_bf16) $(name_fp32):
	cp -f $< $@
endif

.PHONY: cuda bench-cuda
