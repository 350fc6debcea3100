# make wheel           a wheel of the Python package with this machine's libraries, in build/wheel (Linux)
# make wheels          wheels for older systems, AArch64, musl and Windows, in build/dist; make wheel-TARGET: one of them
# make sdist           a source distribution of the Python package, in build/sdist
# make deb             a package for Debian 12 and 13, in build/dist

# Included by the Makefile.

# A wheel with all libraries, for any Python 3 and any Linux whose C library is not older than this one.
wheel: $(BUILD)/.deps-wheel $(BIN)/$(call shared_name,libmoetext)
	rm -rf $(BUILD)/wheel tools/python/build
	.venv/bin/pip wheel --quiet --no-deps --wheel-dir $(BUILD)/wheel/plain ./tools/python
	PATH="$$PWD/.venv/bin:$$PATH" .venv/bin/auditwheel repair --strip --wheel-dir $(BUILD)/wheel $(BUILD)/wheel/plain/*.whl
	@rm -rf $(BUILD)/wheel/plain tools/python/build
	@ls $(BUILD)/wheel/*.whl

WHEELS = manylinux_2_28-x86_64 manylinux_2_28-aarch64 musllinux_1_2-x86_64 windows-x86_64
.PHONY: wheel wheels sdist deb $(WHEELS:%=wheel-%)
$(WHEELS:%=wheel-%): wheel-%: $(BUILD)/.deps-wheel $(BUILD)/.deps-dist
	@tools/dist/wheel $*

wheels: $(WHEELS:%=wheel-%)

deb: $(BUILD)/.deps-dist $(BUILD)/.deps-man
	@tools/dist/deb

sdist: $(BUILD)/.deps-wheel
	rm -rf $(BUILD)/sdist
	.venv/bin/python -m build --sdist --outdir $(BUILD)/sdist tools/python > $(BUILD)/sdist.log 2>&1 || \
	    { cat $(BUILD)/sdist.log; exit 1; }
	@ls $(BUILD)/sdist/*.tar.gz
