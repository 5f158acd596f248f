PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Generated code runs on its own and on newer runtimes only, so it is made with the oldest supported tools.
PROTO_TOOLS := grpcio-tools==1.75.1 protobuf==6.31.1 mypy-protobuf==3.6.0 setuptools==75.8.0

.PHONY: install
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.PHONY: proto
proto: .venv-proto/.installed
	cd protos && PATH=$(CURDIR)/.venv-proto/bin:$$PATH $(CURDIR)/.venv-proto/bin/python -m grpc_tools.protoc \
		-I . -I third_party --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \
		outrider/v1/tree.proto outrider/v1/draft.proto outrider/v1/target.proto

.venv-proto/.installed: Makefile
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip install --quiet $(PROTO_TOOLS)
	touch $@

# The first command of the README: install, fetch the model, start both services, answer, prove, draw the trace.
.PHONY: demo
demo: install
	$(BIN)/outrider demo

.PHONY: lint
lint: install lint-proto
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: test
test: install
	$(BIN)/python -m pytest -m "not full and not gpu and not compose and not sdk"

.PHONY: test-full
test-full: install
	$(BIN)/python -m pytest -m "not gpu and not compose and not sdk"

.PHONY: test-gpu
test-gpu:
	python3 -m pytest -m gpu tests/kernels

.PHONY: test-compose
test-compose: install
	$(BIN)/python -m pytest -m compose tests/stack

PROMPTS ?= benchmarks/prompts.jsonl
.PHONY: bench
bench: install
	$(BIN)/outrider bench --prompts $(PROMPTS) --modes plain,trie,prompt_lookup --concurrency 1,4 \
		--json build/bench.json --plot build/bench.png

.PHONY: up
up:
	docker compose up --build --detach --wait
