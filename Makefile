# The commands of the README. Each fetches or builds what it needs; deploy/envoy/get-envoy finds or
# fetches Envoy.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

target := $(abspath $(or $(CARGO_TARGET_DIR),target))
demo := python3 -B deploy/demo/demo.py --folder $(target)/demo
# The demo shares its build with the tests; PROFILE=release shows what ships.
PROFILE ?= dev
tools := $(target)/tools
# FIPS=1 takes AWS-LC's FIPS module, which needs cmake and Go.
features := $(if $(filter-out 0,$(FIPS)),--features fips)
# Whom the packages name, as `Name <address>`.
export MAINTAINER ?=
# Builds a program from crates.io, not optimised, as it runs for seconds.
install = [[ -d $(tools)/$(1)-$(2) ]] || cargo install --quiet --locked --no-default-features \
	--profile dev --root $(tools)/$(1)-$(2) --target-dir $(tools)/build $(1)@$(2)
# The time of a release's files is no part of the build: cc would compile all C anew for each commit.
cargo_build := env -u SOURCE_DATE_EPOCH cargo build
aarch64 := aarch64-unknown-linux-gnu
# AARCH64=1 makes image, packages and release for aarch64, too.
both := $(filter-out 0,$(AARCH64))

.PHONY: help envoy build local-istiod image image-aarch64 release-aarch64 cluster compare cluster-stop release aarch64 deny deb package demo demo-stop test fuzz bench lint

help: ## Lists these commands.
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 14

envoy: ## Finds or fetches an Envoy.
	@deploy/envoy/get-envoy >/dev/null

build: ## Builds the agent as it ships, and its symbols in target/release/pilot-agent.debug; FIPS=1 with AWS-LC's FIPS module.
	@$(cargo_build) --release --locked --bin pilot-agent $(features)
	@deploy/split-symbols $(target)/release/pilot-agent

local-istiod: ## Builds the control plane of demo and tests.
	@$(cargo_build) --locked --package local-istiod

image: build envoy $(if $(both),image-aarch64) ## Builds the image as an OCI layout, target/image/oci; needs Debian's buildah.
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
release: deny image package ## Leaves archive, packages, image, provenance and checksums in target/dist; AARCH64=1 adds those for aarch64.
	@deploy/release $(target)/dist $(target)/image $(if $(both),$(target)/image-aarch64) \
	  $(target)/debian/*.deb $(foreach in,. $(if $(both),$(aarch64)),$(target)/$(in)/generate-rpm/*.rpm) \
	  -- $(foreach in,. $(if $(both),$(aarch64)),$(target)/$(in)/release/pilot-agent)

aarch64: local-istiod ## Builds the agent for aarch64 and runs it in an emulator; needs qemu-user and a cross compiler.
	@rustup target list --installed | grep -qx $(aarch64) || rustup target add $(aarch64)
	@CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	$(cargo_build) --profile $(PROFILE) --locked --bin pilot-agent --target $(aarch64) $(features)
	@if [[ $(PROFILE) == release ]]; then \
	OBJCOPY=aarch64-linux-gnu-objcopy deploy/split-symbols $(target)/$(aarch64)/release/pilot-agent; fi
	@tests/aarch64 $(target)/$(aarch64)/$(PROFILE:dev=debug)/pilot-agent $(target)/debug/local-istiod

deny: ## Checks licences, duplicates, and known vulnerabilities of the crates if GitHub can be reached.
	@rm -f $(target)/advisories-checked
	@$(call install,cargo-deny,0.20.2)
	@deny="$(tools)/cargo-deny-0.20.2/bin/cargo-deny --config .cargo/deny.toml check --hide-inclusion-graph"; \
	$$deny bans licenses sources; \
	if timeout 20 git ls-remote --quiet https://github.com/RustSec/advisory-db HEAD >/dev/null 2>&1; then \
	$$deny advisories; sha256sum Cargo.lock >$(target)/advisories-checked; else echo "make deny: no GitHub; vulnerabilities are not checked" >&2; fi

deb := $(tools)/cargo-deb-3.8.0/bin/cargo-deb --no-build --no-strip $(if $(MAINTAINER),--maintainer "$$MAINTAINER")
deb: build $(if $(both),release-aarch64) ## Builds the package of the agent for machines with Debian.
	@deploy/inventory $(shell uname -m)-unknown-linux-gnu $(target)/release
	@$(call install,cargo-deb,3.8.0)
	@rm -f $(target)/debian/*.deb
	@$(deb)
	@$(if $(both),deploy/inventory $(aarch64) $(target)/$(aarch64)/release; $(deb) --target $(aarch64))

rpm := $(tools)/cargo-generate-rpm-0.21.1/bin/cargo-generate-rpm
package: deb ## Builds the packages for machines, a .deb and an .rpm.
	@$(call install,cargo-generate-rpm,0.21.1)
	@$(rpm)
	@$(if $(both),$(rpm) --target $(aarch64))

cluster: $(if $(CONTEXT)$(LAYOUT),,image) ## Runs a Kubernetes with istiod and the suite in it, as root; or CONTEXT= of yours with IMAGE=.
	@python3 -B tests/cluster/main.py --folder $(target)/cluster --suite $(or $(SUITE),all) \
	  $(if $(CONTEXT),--context "$(CONTEXT)" --image "$(IMAGE)" --application "$(APPLICATION)",\
	  --layout $(or $(LAYOUT),$(target)/image/oci)) $(if $(ISTIOD),--istiod $(ISTIOD)) $(if $(filter-out 0,$(KEEP)),--keep)

compare: image build ## Runs Go's agent beside this one in such a cluster, and writes docs/comparison.md.
	@python3 -B tests/cluster/main.py --folder $(target)/cluster --layout $(or $(LAYOUT),$(target)/image/oci) \
	  --agent $(target)/release/pilot-agent --envoy "$$(deploy/envoy/get-envoy)" --write docs/comparison.md $(if $(filter-out 0,$(KEEP)),--keep)

cluster-stop: ## Ends what `make cluster KEEP=1` left running.
	@python3 -B deploy/cluster/cluster.py $(target)/cluster

demo: envoy local-istiod ## Runs the agent, three Envoys and a control plane on this machine; KEEP=1 leaves it running.
	@cargo build --profile $(PROFILE) --locked --bin pilot-agent
	@envoy="$$(deploy/envoy/get-envoy)"; \
	$(demo) --agent $(target)/$(PROFILE:dev=debug)/pilot-agent --istiod $(target)/debug/local-istiod \
	  --envoy "$$envoy" $(if $(filter-out 0,$(KEEP)),--keep)

demo-stop: ## Ends what `make demo KEEP=1` left running.
	@$(demo) --stop

# Most tests wait most of the time, so more of them run at once than there are cores.
test: export RUST_TEST_THREADS ?= $(shell echo $$((2 * $$(nproc))))
test: ## Runs all tests, those with a real Envoy included.
	@ENVOY_BIN="$$(deploy/envoy/get-envoy)"; \
	export ENVOY_BIN; \
	cargo test --locked $(features)

fuzz: ## Feeds random bytes to every parser of foreign input, FUZZ_SECONDS=60 each.
	@tests/fuzz

bench: ## Runs the benchmarks.
	@cargo bench --locked --package istio-agent

lint: ## Checks format and lints; warnings are errors.
	@cargo fmt --check
	@cargo clippy --all-targets --locked -- -D warnings
