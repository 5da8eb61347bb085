"""Builds the programs of a cluster from Go modules, once for each version, and stores them outside the clone."""

import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

MODULES = pathlib.Path(__file__).resolve().parent / "programs"
CACHE = pathlib.Path(os.environ.get("ISTIO_AGENT_CACHE") or pathlib.Path(
    os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "istio-agent")
MODULE = {"kubernetes": "k8s.io/kubernetes", "istio": "istio.io/istio", "tools": "go.etcd.io/etcd/server/v3",
          "spire": "github.com/spiffe/spire", "containerd": "github.com/containerd/containerd/v2",
          "runc": "github.com/opencontainers/runc"}
KUBERNETES = ["-ldflags=-s -w -X k8s.io/component-base/version.gitVersion={version}", "tool"]
# The packages of Istio's integration tests that are run.
ISTIO_TESTS = [
    "security", "security/ca_custom_root", "security/cacert_rotation", "security/crl", "security/ecc_signature_algorithm",
    "security/external_ca", "security/external_sds_provider", "security/file_mounted_certs",
    "security/filebased_tls_origination", "security/https_jwt", "security/policy_attachment_only", "security/pqc",
    "security/remote_jwks", "security/sds_ingress/quic",
    "pilot", "pilot/multiplecontrolplanes", "pilot/nftables", "pilot/resourcefilter", "pilot/revisions", "helm"]
# The arguments of `go build` for each stage, or of `go test -c` if the first word is "test".
STAGES = {
    "kubernetes": [KUBERNETES],
    "kubernetes/1.37": [KUBERNETES],
    "containerd": [["-tags=no_btrfs,no_devmapper,no_zfs,urfave_cli_no_docs", "tool"]],
    # Without libseccomp, runc refuses pods with a seccomp profile.
    "runc": [["-tags=seccomp,urfave_cli_no_docs", "tool"]],
    "istio": [["-tags=agent,disable_pgv", "istio.io/istio/pilot/cmd/pilot-agent",
               "istio.io/istio/cni/cmd/install-cni", "istio.io/istio/cni/cmd/istio-cni"],
              ["-tags=vtprotobuf,disable_pgv", "istio.io/istio/pilot/cmd/pilot-discovery",
               "istio.io/istio/istioctl/cmd/istioctl"]],
    "istio/1.30": [["-tags=vtprotobuf,disable_pgv", "istio.io/istio/pilot/cmd/pilot-discovery"]],
    # With the tags and -trimpath of istiod, most packages come from Go's cache. Linking a test takes 1.4 GB, so -p=1
    # links one at a time.
    "istio/tests": [["-tags=vtprotobuf,disable_pgv", *(f"istio.io/istio/{path}" for path in (
                        "pkg/test/echo/cmd/client", "pkg/test/echo/cmd/server", "samples/extauthz/cmd/extauthz",
                        "samples/jwt-server/src")), "helm.sh/helm/v4/cmd/helm",
                     "sigs.k8s.io/gateway-api/conformance/echo-basic"],
                    ["test", "-p=1", "-vet=off", "-tags=integ,vtprotobuf,disable_pgv",
                     *(f"istio.io/istio/tests/integration/{path}" for path in ISTIO_TESTS)]],
    "tools": [["./...", "tool"]],
    "spire": [["tool"]],
}
ISTIODS = ["istio", "istio/1.30"]
# The modules with the programs of a node, by the release of Kubernetes. The first one runs with Debian's containerd and runc.
RELEASES = {"1.34": ["kubernetes"], "1.37": ["kubernetes/1.37", "containerd", "runc"]}
# The files of Istio's module that the charts, pilot-agent and the Gateway API need.
ISTIO_FILES = ["manifests", "tools/packaging/common/envoy_bootstrap.json",
               "tests/integration/pilot/testdata/gateway-api-crd.yaml"]
# Istio's tests read files of the entire module.
FILES = {"istio": ISTIO_FILES, "istio/1.30": ISTIO_FILES, "istio/tests": [""]}


def programs(name):
    """Returns the folder with the programs of a module, and builds them if that was not done before."""
    folder, _, variant = name.partition("/")
    module = MODULES / folder
    mod = module / f"{variant}.mod"
    mod = mod if mod.exists() else module / "go.mod"
    version = re.search(rf"^(?:require )?\t?{MODULE[folder]} (v\S+)", mod.read_text(), re.MULTILINE)[1]
    sources = (mod, mod.with_suffix(".sum"), *sorted(module.glob("*/*.go")))
    pinned = b"".join(path.read_bytes() for path in sources)
    digest = hashlib.sha256(pinned + repr(STAGES[name]).encode()).hexdigest()[:8]
    built = CACHE / f"{folder}-{version}-{digest}"
    if not built.exists():
        build(name, mod, version, built)
    return built


def build(name, mod, version, built):
    say(f"building {built.name}; this happens once on a machine, and can take minutes")
    go = shutil.which("go", path=f"{os.environ['PATH']}:/usr/local/go/bin") or sys.exit(
        "cluster: Go is needed, to build Kubernetes and istiod")
    CACHE.mkdir(parents=True, exist_ok=True)
    fresh = pathlib.Path(tempfile.mkdtemp(prefix=f"{built.name}.", dir=CACHE))
    # SPIRE's server can use SQLite only through C, and runc needs C to enter namespaces.
    cgo = "1" if name in ("spire", "runc") else "0"
    environment = os.environ | {"CGO_ENABLED": cgo, "GOFLAGS": "-buildvcs=false -mod=readonly"}
    in_module = {"cwd": mod.parent, "env": environment, "check": True}
    try:
        for flags in STAGES[name]:
            command, flags = (["test", "-c"], flags[1:]) if flags[0] == "test" else (["build"], flags)
            flags = [flag.format(version=version) for flag in flags]
            subprocess.run([go, *command, f"-modfile={mod}", "-trimpath", "-ldflags=-s -w",
                            "-o", f"{fresh}/", *flags], **in_module)
        if files := FILES.get(name):
            source = subprocess.run([go, "list", f"-modfile={mod}", "-m", "-f", "{{.Dir}}", "istio.io/istio"],
                                    capture_output=True, text=True, **in_module).stdout.strip()
            for file in files:
                subprocess.run(["cp", "-r", "--no-preserve=mode", f"{source}/{file}", fresh], check=True)
        fresh.chmod(0o755)
        fresh.rename(built)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def say(text):
    print(f"cluster: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(programs(*sys.argv[1:]))
