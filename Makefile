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
