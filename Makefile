PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is written of what is imported, whatever the environment says: two thirds of installing were for that of ten
# thousand modules, most of which nobody imports.
PIP_INSTALL := $(BIN)/pip install --disable-pip-version-check --no-compile --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE
# Generated code runs on its own and on newer runtimes only, so it is made with the oldest supported tools.
PROTO_TOOLS := grpcio-tools==1.75.1 protobuf==6.31.1 mypy-protobuf==3.6.0 setuptools==75.8.0
PROTOC := PATH=$(CURDIR)/.venv-proto/bin:$$PATH $(CURDIR)/.venv-proto/bin/python -m grpc_tools.protoc -I . -I third_party
PROTO_FILES := outrider/v1/tree.proto outrider/v1/draft.proto outrider/v1/target.proto
# In a package of ours: the name openengine is that of the official bindings.
OPENENGINE := outrider/openengine
OPENENGINE_FILES := -I third_party/openengine/v1 openengine.proto
PROMPTS ?= benchmarks/prompts.jsonl
# Prompts of the benchmark, spread over the tasks.
LIMIT ?= 14

.PHONY: help
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# make demo          install, fetch the model, start both services, answer, prove the answer, draw the trace
.PHONY: demo
demo: install
	$(BIN)/outrider demo

# make install       everything into .venv
.PHONY: install
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo 'Installing into $(VENV); torch and its companions take some minutes the first time.'
	@$(PYTHON) -m venv $(VENV) || { echo 'Debian keeps venv apart: apt-get install python3-venv' >&2; exit 1; }
	$(PIP_INSTALL) --quiet --upgrade pip
	$(PIP_INSTALL) torch==2.13.0
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

# Two workers more than cores, since tests wait for a fifth of their time: where three of them took 603 s on two
# cores, four took 568.
# Torch computes with one thread in each: teams that share cores wait for each other. Files in the order of
# tests/conftest.py, the longest first: sorted by their numbers of tests, those of few long ones came last.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)
test test-full build/.compiled: export OMP_NUM_THREADS := 1

NUMBA_FILES := $(shell grep -rl --include='*.py' -e numba -e draft_service.compiling draft_service target_service)
# Loops of drafters and targets are compiled once, in fifty seconds, and not by every process that begins before they are kept.
build/.compiled: $(NUMBA_FILES) tests/compiled.py $(VENV)/.installed
	@mkdir -p build
	$(BIN)/python tests/compiled.py
	@touch $@

# make test          everything that a CPU can prove
.PHONY: test
test: install build/.compiled
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --rerun-failed-alone --durations 20 -m "not full and not gpu and not compose and not sdk and not install and not chaos and not ray"

# make test-full     the same and the long matrix: 42 real prompts, every drafter
.PHONY: test-full
test-full: install build/.compiled
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --rerun-failed-alone --hypothesis-profile others --durations 20 -m "not gpu and not compose and not sdk and not install and not chaos and not ray"

# make test-chaos    a thousand fault runs, a million frames, two soaks of an hour, attacks; three hours on two cores, figures in build/chaos
.PHONY: test-chaos
test-chaos: export OMP_NUM_THREADS := 1
test-chaos: export OUTRIDER_CHAOS_RESULTS := build/chaos
test-chaos: install
	$(BIN)/python -m pytest -s -m chaos tests/chaos

# All may run beside each other, as in .ci/run: what failed in one is no other's.
# make test-install  a wheel and a source distribution, installed in a clean environment, each role run
.PHONY: test-install
test-install: install
	$(BIN)/python -m pytest -o cache_dir=build/.pytest-install --rerun-failed-alone -m install tests/install

# make test-sdk      the TypeScript and Go clients against the real services
.PHONY: test-sdk
test-sdk: install
	tests/sdk/install_toolchains.sh
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m pytest -o cache_dir=build/.pytest-sdk --rerun-failed-alone -m sdk tests/sdk

# make test-ray      clusters of Ray on this machine: kills, scaling, weights; installs outrider[ray]
.PHONY: test-ray
test-ray: export OMP_NUM_THREADS := 1
test-ray: install
	$(PIP_INSTALL) --editable '.[ray]'
	$(BIN)/python -m pytest -o cache_dir=build/.pytest-ray -m ray tests/fleet

# make go-module     gives the Go client the path that it is published under: GO_MODULE=github.com/you/outrider/clients/go
GO_MODULE ?=
.PHONY: go-module
go-module:
	clients/go/set_module.sh '$(GO_MODULE)'

# make test-compose  the compose stack for real; needs a Docker engine
.PHONY: test-compose
test-compose: install
	$(BIN)/python -m pytest --maxfail=3 -m compose tests/stack

# make test-gpu      kernels and engine on a CUDA device, with the environment's own torch
.PHONY: test-gpu
test-gpu:
	PYTHONPATH=kernels:protos:tests:. $(PYTHON) -m pytest -c /dev/null --rootdir . --import-mode=importlib -m gpu -v --durations 20 \
	  tests/kernels tests/e2e/test_gpu.py tests/e2e/test_gpu_features.py tests/e2e/test_gpu_layers.py tests/e2e/test_gpu_ranks.py \
	  tests/draft/test_eagle_gpu.py tests/draft/test_eagle_fused.py tests/draft/test_model_drafter.py \
	  tests/draft/test_training_unrolling.py

# make lint          ruff, mypy --strict, buf lint and breaking, generated code current
.PHONY: lint
lint: install lint-proto
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: lint-proto
lint-proto: install check-proto
	$(BIN)/buf lint
	protos/check_breaking.sh $(BIN)/buf

# make proto         generate the Python code of the contract
.PHONY: proto
proto: .venv-proto/.installed
	cd protos && $(PROTOC) --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. $(PROTO_FILES)
	cd protos && $(PROTOC) --python_out=$(OPENENGINE) --mypy_out=$(OPENENGINE) $(OPENENGINE_FILES)

# Generated code is checked in; this fails when it is not what the contract gives.
.PHONY: check-proto
check-proto: .venv-proto/.installed
	rm -rf build/proto && mkdir -p build/proto/$(OPENENGINE)
	cd protos && out=$(CURDIR)/build/proto && \
		$(PROTOC) --python_out=$$out --grpc_python_out=$$out --mypy_out=$$out --mypy_grpc_out=$$out $(PROTO_FILES) && \
		$(PROTOC) --python_out=$$out/$(OPENENGINE) --mypy_out=$$out/$(OPENENGINE) $(OPENENGINE_FILES)
	for package in outrider/v1 $(OPENENGINE); do \
		diff -rq -x '*.proto' -x '__init__.py' -x '__pycache__' build/proto/$$package protos/$$package || \
			{ echo "protos/$$package: generated code is not current, run \`make proto\`" >&2; exit 1; }; \
	done

.venv-proto/.installed:
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip install --disable-pip-version-check --quiet $(PROTO_TOOLS)
	@touch $@

# make bench         speed and acceptance by task and concurrency, as a table, JSON and a plot in build/
.PHONY: bench
bench: install
	@mkdir -p build
	$(BIN)/outrider bench --prompts $(PROMPTS) --limit $(LIMIT) --modes plain,trie,prompt_lookup --concurrency 1,4 \
		--json build/bench.json --plot build/bench.png

# make bench-gpu     kernels, steps, engine and service on a CUDA device, with the environment's own torch: JSON in build/
.PHONY: bench-gpu
bench-gpu: export PYTHONPATH := kernels:protos:clients:tests:.:$(PYTHONPATH)
bench-gpu:
	@mkdir -p build
	$(PYTHON) -m benchmarks.kernels.tree_attention --grid small --xqa --dense --json build/tree-attention.json
	$(PYTHON) -m benchmarks.kernels.verification --json build/verification.json
	$(PYTHON) -m benchmarks.engine.steps --modes fused invariant --json build/steps.json
	$(PYTHON) -m benchmarks.serving.serving --modes plain,trie --concurrency 1,8,32,64,128,256 --arrangements engine,own,shared \
		--together --target '{"max_running": 256}' --json build/serving.json
	$(PYTHON) -m benchmarks.engine.parity --device cuda --json build/parity.json

# make up            the compose stack: target, draft, Prometheus; PROFILE=observability adds Grafana and Jaeger
PROFILE ?=
.PHONY: up
up:
	$(if $(filter observability,$(PROFILE)),OUTRIDER_OTLP_ENDPOINT=http://jaeger:4317) \
		target_service/stack/up.sh $(PROFILE:%=--profile %)
