# commfuse/ as a library for other programs (CPUs, MPI). Included by the Makefile.

PREFIX ?= /usr/local
L      := $(if $(SAN),$(B),build)/lib
# The other headers of commfuse/ are internal.
public_headers := $(addsuffix .h,$(addprefix commfuse/,choice context device fuse memory mesh replay schedule schedule_check trace \
                                                       transport tune base/die base/host base/extern_c))
CF_VERSION := $(shell sed -n 's/^.define CF_VERSION "\(.*\)"/\1/p' commfuse/context.h)
soname     := libcommfuse.so.$(basename $(CF_VERSION))
lib_objects := $(patsubst %.c,$(L)/%.o,$(core))
lib_libs    := $(MPI_LIBS) -lpthread -lm

lib: $(L)/libcommfuse.a $(L)/$(soname) $(L)/commfuse.pc ## build/lib/libcommfuse.a and .so: commfuse/ for other programs
$(L)/%.o: %.c build/machine
	$(call compile,-fPIC)
$(L)/libcommfuse.a: $(lib_objects)
	rm -f $@
	$(AR) rcs $@ $^
$(L)/$(soname): $(lib_objects)
	@echo '{ global: cf_*; local: *; };' > $(L)/symbols
	$(CC) $(FLAGS) $(LDFLAGS) -shared -Wl,-soname,$(soname),--version-script=$(L)/symbols -o $@ $^ $(lib_libs)
# Paths are relative to this file, so the installed tree may be moved.
$(L)/commfuse.pc: Makefile scripts/lib.mk commfuse/context.h
	@mkdir -p $(@D)
	@printf '%s\n' 'prefix=$${pcfiledir}/../..' 'libdir=$${prefix}/lib' 'includedir=$${prefix}/include' '' 'Name: commfuse' \
	    'Description: computations and the collectives beside them as fused operations' 'Version: $(CF_VERSION)' \
	    'Cflags: -I$${includedir}' 'Libs: -L$${libdir} -lcommfuse' 'Libs.private: -fopenmp $(lib_libs)' > $@

to := $(DESTDIR)$(PREFIX)
install: lib ## the library, its headers, pkg-config file and examples, below PREFIX (/usr/local), or DESTDIR/PREFIX
	install -d $(patsubst %,'$(to)/include/%',$(sort $(dir $(public_headers)))) '$(to)/lib/pkgconfig' '$(to)/share/commfuse/examples'
	$(foreach header,$(public_headers),install -m 644 $(header) '$(to)/include/$(header)' &&) true
	install -m 644 $(L)/libcommfuse.a '$(to)/lib'
	install -m 755 $(L)/$(soname) '$(to)/lib'
	ln -sf $(soname) '$(to)/lib/libcommfuse.so'
	install -m 644 $(L)/commfuse.pc '$(to)/lib/pkgconfig'
	install -m 644 $(wildcard commfuse/examples/*) '$(to)/share/commfuse/examples'

.PHONY: lib install
