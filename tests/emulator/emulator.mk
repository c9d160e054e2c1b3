# The GPU program without a GPU: the same .cu files by g++ against the emulator's headers, linked to its library. Included
# after scripts/cuda.mk, whose rules it uses.
#
#     make emulated                build/emulated-fp32/train_gpt and build/emulated-bf16/train_gpt
#     make emulated SAN=thread     with a sanitizer, in build/emulated-fp32-san-thread/ …
#     build/emulated-fp32/tests/emulator/test_emulator     the emulator's own test
#
# cuDNN is not emulated: compiled without it, attention_cudnn.cu says "not supported".
# SAN=alignment: misaligned packs, which fault on a GPU, are reported.

CXX ?= g++
emulated_optimise := $(if $(SAN),$(OPT),-O2)
emulated_flags = -g $(MATH) $(DEFINE) $(emulated_optimise) -Wall -Wextra -Werror -Wshadow $(CPPFLAGS)
emulated_library := $(filter-out tests/emulator/test_% tests/emulator/layers.cc,$(wildcard tests/emulator/*.cc))
emulated_objects := $(gpu_objects) $(data_objects) $(emulated_library:%.cc=%.o) tests/emulator/layers.o
emulated_cc    = $(CC) $(emulated_flags) -std=gnu11 $(OMP) $(CFLAGS)
emulated_cxx   = $(CXX) $(emulated_flags) -std=gnu++17 -fno-strict-aliasing -fopenmp-simd -x c++ -D__CUDACC__ \
                 -DCF_BLOCK_BYTES=1 -Itests/emulator/include -Wno-shadow -Wno-unknown-pragmas -Wno-missing-field-initializers -Wno-unused-function $(CXXFLAGS)
# What clock.cc and layers.cc replace.
emulated_moves := cf_add layernorm_forward layernorm_backward residual_forward gated_forward gated_backward rotary_turn linear_bias_grad crossentropy_stats crossentropy_combine crossentropy_fused optimizer_update sum_of_squares position_forward position_backward nesterov_momentum orthogonal_update copy_block orthogonalise
emulated_wraps := -Wl,--wrap=clock_gettime,--wrap=nanosleep,--wrap=sched_yield
emulated_link  = $(CXX) $(emulated_optimise) $(OMP) $(CXXFLAGS) $(LDFLAGS) $(emulated_wraps),--wrap=attention_cudnn_forward,--wrap=attention_cudnn_backward,--wrap=linear_wgrad_rows_min,--wrap=linear_wgrad_depth_min,--wrap=random_normal,--wrap=cf_word_write,--wrap=cf_word_is,--wrap=cf_paced_copy,--wrap=cf_bootstrap_create $(foreach name,$(emulated_moves),-Wl,--wrap=$(name))
emulated_libs  = $(CRYPTO) $(MPI_LIBS) -lpthread -lm $(LDLIBS)
emulated_test_libs := -lcmocka $(CJSON)

emulated: emulated-fp32 emulated-bf16
# emulated_variant TYPE, DIRECTORY
define emulated_variant
$(call gpu_variant,$(2),$(1),emulated)
emulated-$(1): $(2)/train_gpt $(2)/tests/emulator/test_emulator
$(2)/tests/emulator/%.o: tests/emulator/%.cc build/machine
	@mkdir -p $$(@D)
	$$(emulated_cxx) $$(real_$(1)) -O3 -MMD -MP -c -o $$@ $$<
$(2)/tests/emulator/test_emulator: $(patsubst %.cc,$(2)/%.o,tests/emulator/test_emulator.cc $(emulated_library))
	$$(CXX) $$(emulated_optimise) $$(CXXFLAGS) $$(LDFLAGS) $$(emulated_wraps) -o $$@ $$^ -lpthread -lm
endef
emulated_suffix := $(if $(SAN),-san-$(subst $(comma),-,$(SAN)))
$(eval $(call emulated_variant,fp32,build/emulated-fp32$(emulated_suffix)))
$(eval $(call emulated_variant,bf16,build/emulated-bf16$(emulated_suffix)))

.PHONY: emulated emulated-fp32 emulated-bf16
