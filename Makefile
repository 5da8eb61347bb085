# The commands of the README. Each fetches or builds what it needs; deploy/envoy/get-envoy finds or
# fetches Envoy.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

target := $(abspath $(or $(CARGO_TARGET_DIR),target))
demo := python3 -B deploy/demo/demo.py --folder $(target)/demo
# The demo shares its build with the tests; PROFILE=release shows what ships.
PROFILE ?= dev

.PHONY: help envoy build image demo demo-stop test fuzz bench lint

help: ## Lists these commands.
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 12

envoy: ## Finds or fetches an Envoy.
	@deploy/envoy/get-envoy >/dev/null

build: ## Builds the agent as it ships, and local-istiod beside it.
	@cargo build --release --locked

image: build envoy ## Builds the image as an OCI layout, target/image/oci; needs Debian's buildah.
	@envoy="$$(deploy/envoy/get-envoy)"; \
	deploy/image/build $(target)/release/pilot-agent "$$envoy" $(target)/image

demo: envoy ## Runs the agent, two Envoys and a control plane on this machine; KEEP=1 leaves it running.
	@cargo build --profile $(PROFILE) --locked
	@envoy="$$(deploy/envoy/get-envoy)"; \
	$(demo) --binaries $(target)/$(PROFILE:dev=debug) --envoy "$$envoy" $(if $(filter-out 0,$(KEEP)),--keep)

demo-stop: ## Ends what `make demo KEEP=1` left running.
	@$(demo) --stop

test: ## Runs all tests, those with a real Envoy included.
	@ENVOY_BIN="$$(deploy/envoy/get-envoy)"; \
	export ENVOY_BIN; \
	cargo test --locked

fuzz: ## Feeds random bytes to every parser of foreign input, FUZZ_SECONDS=60 each.
	@tests/fuzz

bench: ## Runs the benchmarks.
	@cargo bench --locked --package istio-agent

lint: ## Checks format and lints; warnings are errors.
	@cargo fmt --check
	@cargo clippy --all-targets --locked -- -D warnings
