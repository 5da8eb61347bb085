# Commands for building, testing and trying the agent. Each command builds or downloads its inputs;
# deploy/envoy/get-envoy finds or downloads Envoy.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

target := $(abspath $(or $(CARGO_TARGET_DIR),target))
demo := python3 -B deploy/demo/demo.py --folder $(target)/demo
# The demo shares its build with the tests; PROFILE=release runs the release build.
PROFILE ?= dev
tools := $(target)/tools
# FIPS=1 builds with AWS-LC's FIPS module, which needs cmake and Go.
features := $(if $(filter-out 0,$(FIPS)),--features fips)
# The maintainer of the packages, as `Name <address>`.
export MAINTAINER ?=
# Builds a program from crates.io, without optimisation, because it runs for seconds only.
install = [[ -d $(tools)/$(1)-$(2) ]] || cargo install --quiet --locked --no-default-features \
	--profile dev --root $(tools)/$(1)-$(2) --target-dir $(tools)/build $(1)@$(2)
# The build does not depend on the time of a release's files; otherwise cc would compile all C code for each commit.
cargo_build := env -u SOURCE_DATE_EPOCH cargo build
aarch64 := aarch64-unknown-linux-gnu
# AARCH64=1 builds image, packages and release for aarch64, too.
both := $(filter-out 0,$(AARCH64))

.PHONY: help envoy build local-istiod image image-aarch64 release-aarch64 cluster compare matplotlib pictures istio-tests cluster-stop release aarch64 deny deb package demo demo-stop test fuzz bench lint

help: ## Lists these commands.
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 14

envoy: ## Finds Envoy, or downloads it.
	@deploy/envoy/get-envoy >/dev/null

build: ## Builds the release binary, and its symbols in target/release/pilot-agent.debug. FIPS=1 uses AWS-LC's FIPS module.
	@$(cargo_build) --release --locked --bin pilot-agent $(features)
	@deploy/split-symbols $(target)/release/pilot-agent

local-istiod: ## Builds the small control plane for the demo and the tests.
	@$(cargo_build) --locked --package local-istiod

image: needs-image build envoy $(if $(both),image-aarch64) ## Builds the image as an OCI layout in target/image/oci. Needs Debian.
	@deploy/image/debian "$$(dpkg --print-architecture)" $(target)/image-debian
	@envoy="$$(deploy/envoy/get-envoy)"; \
	deploy/image/build $(target)/release/pilot-agent "$$envoy" $(target)/image-debian $(target)/image

image-aarch64: release-aarch64
	@deploy/image/debian arm64 $(target)/image-debian-aarch64
	@envoy="$$(deploy/envoy/get-envoy aarch64)"; \
	deploy/image/build $(target)/$(aarch64)/release/pilot-agent "$$envoy" $(target)/image-debian-aarch64 $(target)/image-aarch64

release-aarch64:
	@$(MAKE) aarch64 PROFILE=release

release: export ISTIO_AGENT_REVISION ?= $(shell git rev-parse HEAD)
release: export ISTIO_AGENT_STATUS ?= $(if $(shell git status --porcelain),Modified,Clean)
release: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
release: export PACKAGES ?= named
# Where vulnerabilities are reported, which SECURITY.md of a release names.
release: export SECURITY_CONTACT ?= $(error make release needs SECURITY_CONTACT='<e-mail address or https URL>')
release: deny image package ## Writes archive, packages, image, provenance and checksums to target/dist. AARCH64=1 adds aarch64.
	@deploy/release $(target)/dist $(target)/image $(if $(both),$(target)/image-aarch64) \
	  $(target)/debian/*.deb $(foreach in,. $(if $(both),$(aarch64)),$(target)/$(in)/generate-rpm/*.rpm) \
	  -- $(foreach in,. $(if $(both),$(aarch64)),$(target)/$(in)/release/pilot-agent)

aarch64: local-istiod ## Builds the agent for aarch64 and runs it in an emulator. Needs qemu-user and a cross compiler.
	@rustup target list --installed | grep -qx $(aarch64) || rustup target add $(aarch64)
	@CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	$(cargo_build) --profile $(PROFILE) --locked --bin pilot-agent --target $(aarch64) $(features)
	@if [[ $(PROFILE) == release ]]; then \
	OBJCOPY=aarch64-linux-gnu-objcopy deploy/split-symbols $(target)/$(aarch64)/release/pilot-agent; fi
	@tests/aarch64 $(target)/$(aarch64)/$(PROFILE:dev=debug)/pilot-agent $(target)/debug/local-istiod

deny: ## Checks licences and duplicates of the crates, and known vulnerabilities if GitHub is reachable.
	@rm -f $(target)/advisories-checked
	@$(call install,cargo-deny,0.20.2)
	@deny="$(tools)/cargo-deny-0.20.2/bin/cargo-deny --config .cargo/deny.toml check --hide-inclusion-graph"; \
	$$deny bans licenses sources; \
	if timeout 20 git ls-remote --quiet https://github.com/RustSec/advisory-db HEAD >/dev/null 2>&1; then \
	$$deny advisories; sha256sum Cargo.lock >$(target)/advisories-checked; else echo "make deny: GitHub is unreachable; known vulnerabilities are not checked" >&2; fi

deb := $(tools)/cargo-deb-3.8.0/bin/cargo-deb --no-build --no-strip $(if $(MAINTAINER),--maintainer "$$MAINTAINER")
deb: build $(if $(both),release-aarch64) ## Builds the .deb package for machines.
	@deploy/inventory $(shell uname -m)-unknown-linux-gnu $(target)/release
	@$(call install,cargo-deb,3.8.0)
	@rm -f $(target)/debian/*.deb
	@$(deb)
	@$(if $(both),deploy/inventory $(aarch64) $(target)/$(aarch64)/release; $(deb) --target $(aarch64))

rpm := $(tools)/cargo-generate-rpm-0.21.1/bin/cargo-generate-rpm
package: needs-package deb ## Builds the .deb and .rpm packages for machines.
	@$(call install,cargo-generate-rpm,0.21.1)
	@$(rpm)
	@$(if $(both),$(rpm) --target $(aarch64))

cluster: $(if $(CONTEXT),,needs-cluster $(KUBERNETES:%=needs-cluster-%)) $(if $(CONTEXT)$(LAYOUT),,image) ## Runs the acceptance suite in a Kubernetes on this machine (as root), or in yours: CONTEXT=, IMAGE=, APPLICATION=. KUBERNETES=1.37 runs that release. VARIABLES=NAME=VALUE sets variables of the agent.
	@python3 -B tests/cluster/main.py --folder $(target)/cluster --suite $(or $(SUITE),all) \
	  $(if $(CONTEXT),--context "$(CONTEXT)" --image "$(IMAGE)" --application "$(APPLICATION)",\
	  --layout $(or $(LAYOUT),$(target)/image/oci)) $(if $(ISTIOD),--istiod $(ISTIOD)) $(KUBERNETES:%=--kubernetes %) $(VARIABLES:%=--variable %) --only "$(ONLY)" \
	  $(if $(filter-out 0,$(KEEP)),--keep)

compare: needs-compare matplotlib image build ## Compares pilot-agent and this agent in such a cluster (as root), and writes docs/comparison.md. ONLY=measured_pods repeats a part.
	@PYTHONPATH=$(matplotlib) python3 -B tests/cluster/main.py --folder $(target)/cluster --layout $(or $(LAYOUT),$(target)/image/oci) \
	  --agent $(target)/release/pilot-agent --envoy "$$(deploy/envoy/get-envoy)" --write docs/comparison.md --only "$(ONLY)" $(if $(filter-out 0,$(KEEP)),--keep)

matplotlib := $(tools)/$(shell cat tests/cluster/requirements.txt)
# Without PyPI the pictures stay as they are.
matplotlib: export PIP_ROOT_USER_ACTION := ignore
matplotlib:
	@[[ -d $(matplotlib) ]] || { rm -rf $(matplotlib).new && python3 -m pip install --quiet --target $(matplotlib).new \
	  --requirement tests/cluster/requirements.txt && mv $(matplotlib).new $(matplotlib); } || true

pictures: matplotlib ## Draws the pictures of docs/comparison.md again, with matplotlib from PyPI.
	@PYTHONPATH=$(matplotlib) python3 -B tests/cluster/draw.py docs/comparison.md docs

istio-tests: needs-istio-tests $(if $(LAYOUT),,image) ## Runs Istio's integration tests with this agent (as root), or with pilot-agent: AGENT=go. SUITE=security runs a part.
	@python3 -B tests/istio/main.py --folder $(target)/istio-tests --layout $(or $(LAYOUT),$(target)/image/oci) \
	  --agent $(or $(AGENT),ours) --suite "$(SUITE)" --repeat $(or $(REPEAT),2) $(VARIABLES:%=--variable %) $(if $(filter-out 0,$(WRITE)),--write)

needs-%:
	@deploy/needs $* $(if $(filter cluster istio-tests,$*),$(if $(LAYOUT),,image))

cluster-stop: ## Stops the cluster that `make cluster KEEP=1` left running.
	@python3 -B deploy/cluster/cluster.py $(target)/cluster

demo: envoy local-istiod ## Runs three agents, three Envoys and a control plane on this machine. KEEP=1 leaves them running.
	@cargo build --profile $(PROFILE) --locked --bin pilot-agent
	@envoy="$$(deploy/envoy/get-envoy)"; \
	$(demo) --agent $(target)/$(PROFILE:dev=debug)/pilot-agent --istiod $(target)/debug/local-istiod \
	  --envoy "$$envoy" $(if $(filter-out 0,$(KEEP)),--keep)

demo-stop: ## Stops the demo that `make demo KEEP=1` left running.
	@$(demo) --stop

# Most tests wait most of the time, so twice as many tests as cores run at once.
test: export RUST_TEST_THREADS ?= $(shell echo $$((2 * $$(nproc))))
test: ## Runs all tests, also with a real Envoy. ENVOY=1.39 uses that release, and tests hot restarts from and to the usual one.
	@OTHER_ENVOY_BIN="$(if $(ENVOY),$$(ENVOY= deploy/envoy/get-envoy))"; \
	ENVOY_BIN="$$(deploy/envoy/get-envoy)"; \
	export ENVOY_BIN OTHER_ENVOY_BIN; \
	cargo test --locked $(features)

fuzz: ## Feeds random bytes to every parser of foreign input, for FUZZ_SECONDS each (default: 60).
	@tests/fuzz

bench: ## Runs the benchmarks.
	@cargo bench --locked --package istio-agent

lint: ## Checks the Rust format and Clippy lints. Warnings are errors.
	@cargo fmt --check
	@cargo clippy --all-targets --locked -- -D warnings
