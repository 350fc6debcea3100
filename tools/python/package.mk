# Packages of the Python bindings. Included by the Makefile.

# A wheel with all libraries, for any Python 3 and any Linux whose C library is not older than this one.
wheel: $(BUILD)/.deps-wheel $(BIN)/$(call shared_name,libmoetext)
	rm -rf $(BUILD)/wheel tools/python/build
	.venv/bin/pip wheel --quiet --no-deps --wheel-dir $(BUILD)/wheel/plain ./tools/python
	PATH="$$PWD/.venv/bin:$$PATH" .venv/bin/auditwheel repair --strip --wheel-dir $(BUILD)/wheel $(BUILD)/wheel/plain/*.whl
	@rm -rf $(BUILD)/wheel/plain tools/python/build
	@ls $(BUILD)/wheel/*.whl

sdist: $(BUILD)/.deps-wheel
	rm -rf $(BUILD)/sdist
	.venv/bin/python -m build --sdist --outdir $(BUILD)/sdist tools/python > $(BUILD)/sdist.log 2>&1 || \
	    { cat $(BUILD)/sdist.log; exit 1; }
	@ls $(BUILD)/sdist/*.tar.gz
