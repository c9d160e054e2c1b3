# Reports, configuration, lint, format. Included by the Makefile.

experiments = $(if $(filter-out 0,$(QUICK)),--quick) $(if $(PATIENCE),--patience '$(PATIENCE)') $(if $(ONLY),--only '$(ONLY)')
report: all $(benches) ## run the experiments that fit (in a lab if root), write build/report/report.md; QUICK=1: five minutes; PATIENCE=4: smaller errors
	@$(PYTHON) scripts/report.py $(experiments)
predict-check: all ## predictions beside published and measured steps, in build/predict (ten minutes); ONLY=published
	@$(PYTHON) tests/bench/predict_check.py $(if $(ONLY),--only '$(ONLY)')
	@$(if $(ONLY),,$(PYTHON) tests/bench/predict_programs.py)

# $(call look,HEADERS): prints "found", or how to install
look = $$(printf '\#include <%s>\n' $(1) | $(CC) -E -x c - >/dev/null 2>&1 && echo found || echo missing: scripts/install_deps.sh)
dnnl_version = $$(printf '\#include <dnnl.h>\nDNNL_VERSION_MAJOR.DNNL_VERSION_MINOR.DNNL_VERSION_PATCH' | \
    $(CC) -E -P -x c - 2>/dev/null | tail -n 1 | tr -d ' ')
config: ## print the compilers and libraries of this machine
	@echo "compiler     $(CC): $$($(CC) --version | head -1)"
	@echo 'flags        $(subst ','\'',$(FLAGS) $(LDFLAGS))'
	@echo "processor    $(MARCH), for others: make MARCH=x86-64-v3 or armv8.2-a, or what $(CC) -march takes"
	@echo "mpi          $$(mpirun --version 2>/dev/null | head -2 | tr -s ' \n' ' ')[$(if $(MPI_LIBS),mpicc links$(foreach l,$(filter -l%,$(MPI_LIBS)), $l),missing: scripts/install_deps.sh)]"
	@echo "oneDNN       $(call look,dnnl.h) $(dnnl_version)"
	@echo "cJSON        $(call look,cjson/cJSON.h)"
	@echo "xxHash       $(call look,xxhash.h)"
	@echo "cmocka       $(call look,stdarg.h stddef.h stdint.h setjmp.h cmocka.h)"
	@echo "python       $(PYTHON): $$(MPLBACKEND=Agg $(PYTHON) -c 'import sys, numpy, matplotlib; print(sys.version.split()[0], "numpy", numpy.__version__, "matplotlib", matplotlib.__version__)' 2>/dev/null || echo 'numpy or matplotlib missing: scripts/install_deps.sh')"
	@scripts/find_cuda.sh report
	@echo "machine      $$(lscpu | awk -F': +' '/^(Model name|CPU family|Model):/ { printf "%s %s, ", $$1, $$2 }')$$(nproc) cores, $$(uname -sr)"
	@echo "build        $(B), version $(VERSION)"

# For editors and clang tools. train_gpt.cu is C to cc.
compile_flags.txt: Makefile scripts/tools.mk
	@printf '%s\n' -xc $(FLAGS) -Wno-unused-parameter $(MPI_CFLAGS) -I. -I$(B)/recorded '-DVERSION=""' '-DOTHER_PROGRAM=""' > $@
# With this level xxHash asserts that its input is there, which the analyzer reads.
tidy = xargs -n 1 -P "$$(nproc)" clang-tidy --quiet -p . --extra-arg=-DXXH_DEBUGLEVEL=1
lint: compile_flags.txt $(functions) ## clang-tidy over every C file of the program: .clang-tidy says which checks
	@scripts/install_deps.sh --lint
	@echo train_gpt.cu $(filter-out layers/kernels/gemm_bf16%.c,$(core) $(recorded) $(layers_c) $(wildcard data/*.c data/run/*.c)) | $(tidy) 2>/dev/null
	@echo layers/kernels/gemm_bf16*.c | $(tidy) --extra-arg=-DREAL_IS_BF16 2>/dev/null

formatted = $(filter-out build/%,$(wildcard train_gpt.cu $(foreach kind,c h cu cc,*/*.$(kind) */*/*.$(kind) */*/*/*.$(kind))))
format: ## clang-format every C and CUDA file
	@clang-format -i $(formatted)
format-check: ## print what `make format` would change
	@clang-format --dry-run --Werror $(formatted)

.PHONY: predict-check report config lint format format-check
