# Fuzzing of whatever reads files or arguments: libFuzzer programs of clang in build/fuzz/.
#
#     make fuzz                         RUNS=10000000 inputs for each parser, kept in build/fuzz/corpus/
#     make fuzz FUZZ=options RUNS=1000  one of them
#     build/fuzz/fuzz_options FILE      an input again, for instance build/fuzz/options-crash-…
#
# Included by the Makefile, and complete in itself: make -f tests/fuzz/fuzz.mk fuzz-build
# Debian: clang, libclang-rt-14-dev. Not needed for anything else.

FUZZ_CC ?= clang
CJSON   ?= -lcjson
PYTHON  ?= $(shell scripts/find_python.sh)
RUNS    ?= 10000000
FUZZ    ?= tokens model manifest state options

# What each is about. Those of the first line die of bad input, see tests/fuzz/fuzz.h.
fuzz_dying    := tokens model_file input
fuzz_tokens   := tokens input
fuzz_model    := model_file input atomic_file
fuzz_manifest := checkpoint input atomic_file
fuzz_state    := saved_state input atomic_file
fuzz_options  := run/options

fuzz_flags := -std=gnu11 -g -O1 -fno-omit-frame-pointer -Wall -Wextra -Werror -I. -MMD -MP \
              -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
fuzz_harness := build/fuzz/tests/fuzz/fuzz.o build/fuzz/tests/fuzz/ledger.o

fuzz: $(FUZZ:%=run-fuzz-%) ## fuzz the parsers of files and options (clang): make fuzz RUNS=10000000
fuzz-build: $(FUZZ:%=build/fuzz/fuzz_%)

run-fuzz-%: build/fuzz/fuzz_%
	@mkdir -p build/fuzz/corpus/$*
	$(PYTHON) tests/fuzz/seeds.py $* build/fuzz/seeds/$*
	$< -runs=$(RUNS) -max_len=4096 -timeout=10 -print_final_stats=1 -artifact_prefix=build/fuzz/$*- \
	    build/fuzz/corpus/$* build/fuzz/seeds/$*

define fuzz_program
build/fuzz/fuzz_$(1): build/fuzz/tests/fuzz/fuzz_$(1).o $(fuzz_harness) $(fuzz_$(1):%=build/fuzz/data/%.o)
	$$(FUZZ_CC) -fsanitize=fuzzer,address,undefined -Wl,--gc-sections -o $$@ $$^ $$(CJSON) -lm
endef
$(foreach target,$(FUZZ),$(eval $(call fuzz_program,$(target))))

build/fuzz/%.o: %.c
	@mkdir -p $(@D)
	$(FUZZ_CC) $(fuzz_flags) -c -o $@ $<
# Of the parameters only the shapes of tensors are used; what else is there, and all that it needs, is left out.
build/fuzz/fuzz_model: build/fuzz/layers/params.o
build/fuzz/layers/params.o: fuzz_flags := -std=gnu11 -g -O1 -ffunction-sections -I. -MMD -MP
$(fuzz_dying:%=build/fuzz/data/%.o): fuzz_flags += -include tests/fuzz/ledger.h
-include $(shell find build/fuzz -name '*.d' 2>/dev/null)

.PHONY: fuzz fuzz-build
.SECONDARY:
