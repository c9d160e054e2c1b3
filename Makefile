# commfuse.c: `make help` lists the targets, `make config` prints what was found on this machine.
#
#   Makefile           compilers, flags and libraries; the program for CPUs
#   scripts/cuda.mk    the program for GPUs
#   scripts/lib.mk     commfuse/ as a library: make lib, make install
#   tests/tests.mk     tests, benchmarks and what they need; tests/emulator/emulator.mk: the GPU program without a GPU
#   scripts/tools.mk   reports, format, lint, config
#
# Objects mirror the source tree under build/VARIANT/. Variants:
#   release          the CPU program and its tests; bf16 and layers64 in it: the layers in bf16 and in double
#   san-…            the same with SAN=address,undefined or SAN=thread
#   cuda-bf16 -fp32  the GPU program for each element type (make cuda)
#   emulated-…       the same on the CPU, slow and exact (tests/emulator)
#   ref              the layers with plain loops instead of libraries

CC      ?= cc
PYTHON  ?= $(shell scripts/find_python.sh)
SAN     ?=
# The processor to compile for; make MARCH=x86-64-v3 (aarch64: armv8.2-a) for hosts with different processors, or for others.
MARCH   ?= native
# make DEFINE=-DX for code behind #ifdef X; all objects are compiled again. It belongs to the version: with another one no run resumes.
DEFINE  ?=
empty   :=
comma   := ,
variant := $(if $(SAN),san-$(subst $(comma),-,$(SAN)),release)
B       := build/$(variant)

# make WERROR= for a compiler with more warnings than those that this was written with.
WERROR  := -Werror
WARN    := -Wall -Wextra $(WERROR) -Wshadow -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes -Wvla
# clang warns of every `omp simd` loop that it cannot vectorise; gcc ignores the option.
WARN    += -Wno-pass-failed
# After a longjmp, functions with CF_RETURNS (commfuse/base/die.h) read only arguments that they have not changed; gcc also warns of
# variables in functions that it inlines into them. clang ignores the option.
WARN    += -Wno-clobbered -Wno-unknown-warning-option
# The program reads neither errno of math functions nor traps, so exp() and others can be vectorised; NaN and infinity still work.
MATH    := -march=$(MARCH) -fno-math-errno -fno-trapping-math
OPT     := $(if $(SAN),-O1 -fno-omit-frame-pointer -fsanitize=$(SAN) -fno-sanitize-recover=all,-O3)
# libgomp's synchronisation is invisible to the thread sanitizer, so that build has no OpenMP.
OMP     := $(if $(findstring thread,$(SAN)),-fopenmp-simd,-fopenmp)
# CPPFLAGS, CFLAGS, CXXFLAGS, NVCCFLAGS, LDFLAGS and LDLIBS are the user's alone, and come after what is needed.
FLAGS    = -std=gnu11 -g $(OPT) $(MATH) $(OMP) $(WARN) $(DEFINE) $(CPPFLAGS) $(CFLAGS)

MPI_CFLAGS := $(shell mpicc --showme:compile 2>/dev/null || mpicc -compile_info 2>/dev/null | cut -d' ' -f2-)
MPI_LIBS   := $(shell mpicc --showme:link 2>/dev/null || mpicc -link_info 2>/dev/null | cut -d' ' -f2-)
# Libraries that `scripts/install_deps.sh --carry` has copied come before the system's.
DEPS    := build/deps
CJSON   := -lcjson
ifneq ($(wildcard $(DEPS)/include),)
# As directories of the system, whose headers give no warnings. (No comment after the value: its blank would be part of the path.)
export C_INCLUDE_PATH := $(CURDIR)/$(DEPS)/include$(if $(C_INCLUDE_PATH),:$(C_INCLUDE_PATH))
CARRIED := -L$(DEPS)/lib -Xlinker -rpath='$(subst ','\'',$(CURDIR))/$(DEPS)/lib'
CJSON   := $(CARRIED) $(CJSON)
endif
libs     = -ldnnl $(CJSON) $(MPI_LIBS) -lpthread -lm $(LDLIBS)
VERSION := $(shell git describe --always --dirty 2>/dev/null || cat $(DEPS)/version 2>/dev/null || echo unknown)$(if $(DEFINE), $(subst ",,$(DEFINE)))

# --- sources and objects ---

# Not in the GPU program, beside the twins of .cu files.
cpu_alone := $(wildcard commfuse/cpu/*.c layers/kernels/gemm*.c)
# The third twin of device, transport and kernels records what the program would do (--predict).
recorded := commfuse/predict/recorder.c layers/kernels_recorded.c
core     := $(filter-out $(recorded),$(wildcard commfuse/*.c $(addprefix commfuse/,base/*.c cpu/*.c launch/*.c predict/*.c)))
commfuse := $(core:%.c=$(B)/%.o)
data     := $(patsubst %.c,$(B)/%.o,$(wildcard data/*.c data/run/*.c))
layers_c := $(filter-out $(recorded),$(wildcard layers/*.c layers/*/*.c))
layers   := $(patsubst %.c,$(B)/%.o,$(filter-out layers/kernels/gemm_bf16%.c,$(layers_c)))
# The same layers over elements of bf16.
layers16 := $(layers_c:%.c=$(B)/bf16/%.o)
program  := $(commfuse) $(layers) $(data)

# --- the program for CPUs ---

programs := train_gpt train_gpt_bf16 train_gpt_predict train_gpt_predict_bf16
ifeq ($(SAN),)
all: $(programs) compile_flags.txt ## build ./train_gpt, and beside it its bf16 form and what --predict starts (the default)
$(programs): %: $(B)/%
	cp -f $< $@
else
all: $(programs:%=$(B)/%)
endif

$(B)/train_gpt: $(B)/train_gpt.o $(program)
$(B)/train_gpt_bf16: $(B)/train_gpt_bf16.o $(commfuse) $(layers16) $(data)
twins    := $(cpu_alone) $(patsubst %.cu,%.c,$(wildcard layers/*/*.cu))
$(B)/train_gpt_predict: $(B)/train_gpt.o $(filter-out $(twins:%.c=$(B)/%.o),$(program)) $(recorded:%.c=$(B)/%.o)
$(B)/train_gpt_predict_bf16: $(B)/train_gpt_bf16.o $(filter-out $(twins:%.c=$(B)/%.o),$(commfuse)) \
    $(filter-out $(twins:%.c=$(B)/bf16/%.o),$(layers16)) $(data) $(B)/commfuse/predict/recorder.o $(B)/bf16/layers/kernels_recorded.o
$(programs:%=$(B)/%):
	$(CC) $(FLAGS) $(LDFLAGS) -o $@ $^ $(libs)

# A recorded twin defines a macro RECORDED_NAME for each function NAME; here the declarations of the header become functions that
# return it.
functions := $(B)/recorded/device_functions.h $(B)/recorded/kernels_functions.h
define_functions = sed '/^\(\#\|CF_EXTERN\)/d; s://.*::' $(filter %.h,$^) | tr -s '\n;' ' \n' | \
    sed -nE '/typedef/d; s/^[ }]*([a-z][^(={]*\W(\w+)\([^{]*\)) *$$/\1 { return RECORDED_\2; }/p' > $@
$(word 1,$(functions)): commfuse/device.h
$(word 2,$(functions)): $(filter-out %_cudnn.h,$(patsubst %.cu,%.h,$(wildcard layers/*/*.cu)))
$(functions): Makefile
	@mkdir -p $(@D)
	$(define_functions)
$(recorded:%.c=$(B)/%.o) $(B)/bf16/layers/kernels_recorded.o: $(functions)
$(recorded:%.c=$(B)/%.o) $(B)/bf16/layers/kernels_recorded.o: FLAGS += -I$(B)/recorded

# $(call compile,MORE FLAGS). A twin has the parameters of its header, even if it does not use them.
define compile
@mkdir -p $(@D)
$(CC) $(FLAGS) $(if $(filter $(twins) $(recorded),$<),-Wno-unused-parameter) $(MPI_FLAGS) $(1) -MMD -MP -c -o $@ $<
endef
%_mpi.o: MPI_FLAGS := $(MPI_CFLAGS) $(if $(MPI_LIBS),-DCF_WITH_MPI)

# train_gpt.cu is C when cc compiles it and C++ when nvcc does.
$(B)/train_gpt.o: OTHER := -DOTHER_PROGRAM='"train_gpt_bf16"'
$(B)/train_gpt_bf16.o: OTHER := -DREAL_IS_BF16 -DOTHER_PROGRAM='"train_gpt"'
$(B)/train_gpt.o $(B)/train_gpt_bf16.o: train_gpt.cu $(B)/version build/machine
	$(call compile,-Wc++-compat -DVERSION='"$(VERSION)"' $(OTHER) -x c)
$(B)/%.o: %.c build/machine
	$(call compile)
$(B)/bf16/%.o: %.c build/machine
	$(call compile,-DREAL_IS_BF16)

# These files change only when their text does, so objects for another version, processor, MPI library or other flags are compiled
# again.
$(B)/version: TEXT = $(VERSION)
build/machine: TEXT = $(MARCH) $(DEFINE) $(MPI_CFLAGS) $(MPI_LIBS) $(CPPFLAGS) $(CFLAGS) $(CXXFLAGS) $(NVCCFLAGS) $(LDFLAGS)
$(B)/version build/machine: FORCE
	@mkdir -p $(@D)
	@echo '$(subst ','\'',$(TEXT))' | cmp -s - $@ || echo '$(subst ','\'',$(TEXT))' > $@

include scripts/cuda.mk scripts/lib.mk tests/tests.mk scripts/tools.mk

clean: ## remove everything that was built
	rm -rf build $(programs) train_gpt_cuda train_gpt_cuda_fp32 compile_flags.txt

help: ## this list
	@grep -hE '^[a-z_-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z_-]+):.*## /  make \1\t/' | expand -t 20

-include $(shell find build -path build/venv -prune -o -type f -name '*.d' -print 2>/dev/null)
FORCE:
.PHONY: FORCE all clean help
.DELETE_ON_ERROR:
.SECONDARY:
