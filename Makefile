# The commands for users and developers; `make` alone lists them.
PYTHON ?=
VENV := .venv
VENV_DIFY := .venv-dify
VENV_PLUGIN := .venv-plugin
VENV_DOCS := .venv-docs
RUN := $(VENV)/bin/python
# What packs the plugin: .venv where it is, else an environment with what the plugin needs alone, which is not MLX.
PACKING := $(if $(wildcard $(VENV)/.ready),$(VENV),$(VENV_PLUGIN))
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup vision demo test test-dify test-clients test-page fuzz soak check format plugin release docs-site debug bench matrix vision-matrix mac-report models docs lock clean

# $(call python_below,15): the Python to use, of 3.12 or newer but below 3.15: the one that PYTHON names, or the first found.
python_below = $(shell for p in $(or $(PYTHON),python3.12 python3.13 python3.14 python3); do \
	$$p -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, $(1)))' 2>/dev/null && echo $$p && break; done)

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## build .venv with what running needs (the other commands do this first)
	@echo "$(VENV) is ready. Next:"
	@printf '  %-37s %s\n' "$(VENV)/bin/mlx-backend chat" "a chat with a small demonstration model" \
		"$(VENV)/bin/mlx-backend --model NAME" "the server, with a model from Hugging Face or in a folder" \
		"make demo" "server and Dify plugin at work"

# 3.15 has no packages of what is locked yet (requires-python in pyproject.toml says the same).
define find_python
	@test -n "$(call python_below,15)" || { \
		echo "Python 3.12, 3.13 or 3.14 is needed, and $(if $(PYTHON),$(PYTHON) is none of them,none of them was found)."; \
		echo "Install one, or say where it is: make $(MAKECMDGOALS) PYTHON=/path/to/python3.13"; exit 1; }
endef

$(VENV)/.ready: requirements.lock pyproject.toml .ci/link.py .ci/install.py
	$(find_python)
	@$(call python_below,15) -c 'import runpy; runpy.run_path("mlx_backend/device/machine.py", run_name="__main__")'
	@echo "Making the environment $(VENV) with $(call python_below,15) (once; a minute or two with what follows) …"
	@$(call python_below,15) -m venv $(VENV)
	@echo "Installing what the server and the plugin need …"
	@$(RUN) .ci/install.py plugin running || { \
		echo "The dependencies could not be installed; pip says why above. Can the package index be reached?"; exit 1; }
	@$(RUN) .ci/link.py
	@touch $@

vision: $(VENV)/.vision ## add what models need to see images (10 MB; docs/images.md)
	@echo "Models of the families in docs/images.md see images now."

$(VENV)/.vision: requirements.lock $(VENV)/.ready
	@echo "Installing what models need to see images (once) …"
	@$(RUN) .ci/install.py vision || { \
		echo "What models need to see images could not be installed; pip says why above."; exit 1; }
	@touch $@

# What `make test` and the other commands for developers need as well.
$(VENV)/.ready-dev: $(VENV)/.ready $(VENV)/.vision
	@echo "Installing the developers' tools (once) …"
	@$(RUN) .ci/install.py developing || { \
		echo "The developers' tools could not be installed; pip says why above. Can the package index be reached?"; exit 1; }
	@touch $@

demo: $(VENV)/.vision ## server, models and plugin together, driven as Dify drives them (ARGS=--once: stop afterwards)
	@$(RUN) tests/e2e/tour.py $(ARGS)

test: $(VENV)/.ready-dev check ## the checks, and all tests except those on Dify's workflow engine and with real clients
	$(RUN) -m pytest tests --ignore=tests/provider --ignore=tests/graphon --ignore=tests/clients --ignore=tests/page -n auto --maxprocesses 4 --dist loadfile $(ARGS)
	$(RUN) -m pytest tests/provider -n auto --maxprocesses 4 --dist loadfile $(ARGS)

test-dify: $(VENV_DIFY)/.ready $(VENV)/.ready-dev ## chatflows on Dify's own workflow engine (installs it: 55 MB)
	$(RUN) -m pytest tests/graphon $(ARGS)

# The engine has an environment of its own: it pins other versions than the server, and graphon takes no Python 3.14.
$(VENV_DIFY)/.ready: tests/graphon/requirements.txt
	@test -n "$(call python_below,14)" || { \
		echo "Dify's workflow engine needs Python 3.12 or 3.13, and $(if $(PYTHON),$(PYTHON) is neither,neither was found)."; \
		echo "Install one, or say where it is: make test-dify PYTHON=/path/to/python3.13"; exit 1; }
	@echo "Installing Dify's workflow engine into $(VENV_DIFY) (once; half a minute) …"
	@$(call python_below,14) -m venv $(VENV_DIFY)
	@$(VENV_DIFY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $< || { \
		echo "Dify's workflow engine could not be installed; pip says why above. Nothing was tested on it."; exit 1; }
	@touch $@

test-clients: .clients/.ready .clients/.sdks $(VENV)/.ready-dev ## the real coding agents and SDKs, offline (needs npm; installs them into .clients: 1.7 GB)
	$(RUN) tests/clients/offline.py -m pytest tests/clients -n auto --maxprocesses 4 $(ARGS)

# At the versions of the lock file (`npm ci` would want every optional package in it, and the programs for other systems
# are not all there). Their programs for this machine, and a Node that fits, are fetched by scripts of their own.
.clients/.ready: tests/clients/package.json tests/clients/package-lock.json
	@echo "Installing the real clients into .clients (once; a minute or two) …"
	@mkdir -p .clients && cp tests/clients/package.json tests/clients/package-lock.json .clients/
	@npm install --prefix .clients --no-audit --no-fund --loglevel=error || { \
		echo "The clients could not be installed; npm says why above. Nothing was tested with them."; exit 1; }
	@for client in claude codex opencode; do PATH="$(CURDIR)/.clients/node_modules/.bin:$$PATH" $$client --version || exit 1; done
	@touch $@

# An environment for each set of SDKs whose requirements fit together.
SDKS := $(wildcard tests/clients/sdks/*.txt)
.clients/.sdks: $(SDKS) $(VENV)/.ready
	@echo "Installing the SDKs into .clients (once; a minute or two) …"
	@for sdks in $(SDKS); do folder=.clients/$$(basename $$sdks .txt); \
		$(RUN) -m venv $$folder && $$folder/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $$sdks || { \
		echo "The SDKs of $$sdks could not be installed; pip says why above."; exit 1; }; done
	@touch $@

test-page: $(VENV)/.ready-dev $(VENV)/.page ## the page in a real browser, offline (needs Chromium or Chrome; PICTURES=1: write those of docs/)
	$(RUN) -m pytest tests/page -n auto --maxprocesses 2 $(ARGS)

$(VENV)/.page: tests/page/requirements.txt
	@$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

fuzz: $(VENV)/.ready-dev ## requests, replies, histories and schemas drawn at random, for MINUTES=10 or until something fails
	@$(RUN) tests/fuzz/budget.py --minutes $(or $(MINUTES),10) $(ARGS)

soak: $(VENV)/.ready-dev $(VENV)/.soak ## a server under mixed load for MINUTES=60: memory, threads and files, plotted, and whether they stay
	@$(RUN) tests/soak/soak.py --minutes $(or $(MINUTES),60) $(ARGS)

$(VENV)/.soak: tests/soak/requirements.txt
	@$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

check: $(VENV)/.ready-dev ## ruff, types, lock, versions
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy --num-workers auto
	$(RUN) .ci/lock.py --check

format: $(VENV)/.ready-dev ## format and fix with ruff
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

plugin: $(PACKING)/.ready ## write dist/*.difypkg
	@$(PACKING)/bin/python -m dify_mlx_provider.packaging.package

$(VENV_PLUGIN)/.ready: requirements.lock .ci/install.py
	$(find_python)
	@echo "Making the environment $(VENV_PLUGIN) with what the plugin needs (once; half a minute) …"
	@$(call python_below,15) -m venv $(VENV_PLUGIN)
	@$(VENV_PLUGIN)/bin/python .ci/install.py plugin || { \
		echo "What the plugin needs could not be installed; pip says why above. Can the package index be reached?"; exit 1; }
	@touch $@

release: $(VENV)/.ready-dev ## build wheel, sdist and plugin, try them, tag, and say what to upload (ARGS=--dry-run: without a tag)
	@$(RUN) .ci/release.py $(ARGS)

docs-site: $(VENV_DOCS)/.ready ## write docs/ as a site with a search into build/docs/site (installs its generator into .venv-docs)
	@$(VENV_DOCS)/bin/python .ci/site/build.py

$(VENV_DOCS)/.ready: .ci/site/requirements.txt
	$(find_python)
	@echo "Installing the site's generator into $(VENV_DOCS) (once; half a minute) …"
	@$(call python_below,15) -m venv $(VENV_DOCS)
	@$(VENV_DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r $< || { \
		echo "The generator could not be installed; pip says why above."; exit 1; }
	@touch $@

debug: $(VENV)/.ready ## run the plugin from this clone in a Dify elsewhere (URL=HOST:5003 KEY=… from Dify's Plugins page)
	@test -n "$(URL)" -a -n "$(KEY)" || { echo "Say where: make debug URL=HOST:5003 KEY=… (Dify's Plugins page, the bug icon at the top)"; exit 1; }
	@$(RUN) -c 'import socket, sys; socket.create_connection(sys.argv[1].rsplit(":", 1), 5)' "$(URL)" 2>/dev/null || { \
		echo "Nothing answers at $(URL). Dify shows the address and the key behind the bug icon on its Plugins page."; exit 1; }
	@rm -rf build/plugin && $(RUN) -m dify_mlx_provider.packaging.package --folder build/plugin
	@cd build/plugin && INSTALL_METHOD=remote REMOTE_INSTALL_URL="$(URL)" REMOTE_INSTALL_KEY="$(KEY)" \
		"$(CURDIR)/$(RUN)" -m dify_mlx_provider

bench: $(VENV)/.ready-dev ## speed, as ratios measured side by side
	@for b in parser engine server; do echo "== $$b"; $(RUN) tests/benchmarks/bench_$$b.py || exit 1; done
	@$(RUN) tests/benchmarks/bench_peers.py --write

matrix: $(VENV)/.ready-dev ## every architecture of mlx-lm, tiny, next to mlx-lm's own generation (about an hour; goes on where it stopped)
	@$(RUN) tests/benchmarks/architecture_matrix.py --write $(ARGS)

vision-matrix: $(VENV)/.ready-dev ## every family that mlx-vlm sees with, tiny, next to its own generation (ten minutes; ARGS=FAMILY: that one)
	@$(RUN) tests/vlm_matrix.py --write $(ARGS)

mac-report: $(VENV)/.ready ## try the server on this machine, and write one file to send back (MODEL=…: with that model)
	@$(RUN) tests/e2e/mac_report.py $(if $(MODEL),--model "$(MODEL)") $(ARGS)

models: $(VENV)/.ready ## write the files of the predefined models from their table
	@$(RUN) -m dify_mlx_provider.packaging.predefined

docs: $(VENV)/.ready-dev ## write the references of settings, clients and others into docs/
	@$(RUN) .ci/docs_reference.py docs/settings.md docs/families.md docs/shared-server.md docs/clients.md docs/cli.md

lock: $(VENV)/.ready-dev ## write requirements.lock anew (ARGS=--upgrade: with the newest versions)
	$(RUN) .ci/lock.py $(ARGS)

clean: ## remove what the other commands made
	rm -rf $(VENV) $(VENV_DIFY) $(VENV_PLUGIN) $(VENV_DOCS) .clients dist build .mypy_cache .ruff_cache .pytest_cache
