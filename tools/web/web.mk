# make web             moe-web: a page and an ES module that translate in a browser, in build/dist (Debian)

# Included by the Makefile. tools/web/README.md describes the result.

WEB = build/dist/moe-web
WEB_OBJECTS = build/dist/wasm/objects
WEB_FILES = index.html page.mjs worker.mjs moe.mjs moe.d.mts
# A module that imports what moe.mjs provides, without Emscripten's JavaScript.
WEB_LINK = -O2 -sSTANDALONE_WASM --no-entry -sALLOW_MEMORY_GROWTH -sINITIAL_MEMORY=64MB -sMAXIMUM_MEMORY=2GB

.PHONY: web
dist: web
web: $(BUILD)/.deps-dist
	mkdir -p $(WEB_OBJECTS)
	variables=$$(tools/dist/libraries --variables wasm) && \
	    eval env -u MAKEFLAGS -u MAKELEVEL make -j$(JOBS) "$$variables" CFLAGS=-Os BUILD=$(WEB_OBJECTS) \
	    BIN=$(WEB_OBJECTS) $(WEB_OBJECTS)/moe.wasm
	rm -rf $(WEB) && mkdir -p $(WEB)
	cp $(WEB_FILES:%=tools/web/%) $(WEB_OBJECTS)/moe.wasm LICENSE $(WEB)
	sed 's/"version": ".*"/"version": "$(VERSION)"/' tools/web/package.json > $(WEB)/package.json
	cd build/dist/wasm/licences && for file in */*; do echo "==== $$file"; cat "$$file"; done > $(CURDIR)/$(WEB)/NOTICES
	chmod -R a=rX,u+w $(WEB)

$(BUILD)/moe.wasm: $(BUILD)/web.o $(TEXT_OBJECTS) $(MOE_OBJECTS)
	$(LINK) $(WEB_LINK) $(TEXT_LIBS) -o $@
