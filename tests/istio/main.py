"""Runs Istio's own integration tests with this agent in the proxies: see `make istio-tests` in the Makefile.

tests.csv has the tests, the reasons why some of them are not run, and the last results. A test that fails is repeated,
then run with pilot-agent. If it fails only with this agent, the command fails.
"""

import argparse
import contextlib
import csv
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "deploy" / "cluster"))

from cluster import Cluster, add_istiod, go_agent
from programs import programs, say

LIST = HERE / "tests.csv"
HUB = "localhost/it"
# The registry of the images for the conformance tests of the Gateway API.
GATEWAY_API = "registry.k8s.io/gateway-api"
AGENTS = {"ours": "this agent", "go": "pilot-agent"}
PASS, FAIL, SKIP = "pass", "fail", "skip"
CHARTS = "manifests/charts"
# Changes of Istio's files, because Envoy has no extensions of Istio here, the node pulls no images, and root may lack
# the capability SYS_RESOURCE.
EDITS = [
    (f"{CHARTS}/istio-control/istio-discovery/values.yaml", "  telemetry:\n    enabled: true\n", "  telemetry:\n    enabled: false\n"),
    (f"{CHARTS}/istio-control/istio-discovery/values.yaml", "  env: {}\n", """  env:
    PILOT_DISABLE_MX_ALPN: "true"
    PILOT_ENABLE_ALPN_FILTER: "false"
    PILOT_ENABLE_METADATA_EXCHANGE: "false"
"""),
    ("pkg/test/framework/components/echo/kube/templates/vm_deployment.yaml", "            - SYS_RESOURCE # Required for core dumps\n", ""),
    (f"{CHARTS}/gateway/values.yaml", 'imagePullPolicy: ""', "imagePullPolicy: IfNotPresent"),
    ("samples/extauthz/ext-authz.yaml", "imagePullPolicy: Always", "imagePullPolicy: IfNotPresent"),
    ("samples/extauthz/local-ext-authz.yaml", "imagePullPolicy: Always", "imagePullPolicy: IfNotPresent"),
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="logs and the cluster")
    parser.add_argument("--layout", type=pathlib.Path, required=True, help="the agent's image, an OCI layout")
    parser.add_argument("--agent", choices=AGENTS, default="ours", help="go runs all tests with pilot-agent")
    parser.add_argument("--variable", action="append", default=[], help="sets NAME=VALUE in this agent's containers")
    parser.add_argument("--suite", default="", help="runs the parts whose names begin with this")
    parser.add_argument("--repeat", type=int, default=2, help="how often a test that fails is repeated with each agent")
    parser.add_argument("--write", action="store_true", help="writes the results to tests.csv")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options.folder = options.folder.resolve()
    built = programs("istio/tests")
    rows = read_list(next(built.glob("istio@*")))
    parts = {row["part"]: [] for row in rows if not row["skipped"] and row["part"].startswith(options.suite)}
    if not parts:
        sys.exit(f"istio-tests: no part begins with {options.suite}: {', '.join(sorted({row['part'] for row in rows}))}")
    for row in rows:
        if not row["skipped"] and row["part"] in parts:
            parts[row["part"]].append(row)
    worse = []
    for part, tests in parts.items():
        worse += run_part(options, built, part, tests)
        if options.write:
            write_list(rows)
    for name in worse:
        print(f"FAILED {name}: passes with pilot-agent")
    return 1 if worse else 0


def run_part(options, built, part, rows):
    """Runs tests of a package, and notes the results. Returns those that fail with this agent only."""
    package, names = rows[0]["package"], [row["test"] for row in rows]
    results = {options.agent: repeated(options, built, part, package, options.agent, names)}
    failed = [name for name in names if results[options.agent][name] == FAIL]
    if options.agent == "ours" and failed:
        results["go"] = repeated(options, built, part, package, "go", failed)
    for agent, found in results.items():
        for row in rows:
            if row["test"] in found:
                row[agent] = summary(row["test"], found)
    go = results.get("go", {})
    return [name for name in leaves(results.get("ours", {})) if go.get(name, go.get(name.partition("/")[0])) == PASS]


def repeated(options, built, part, package, agent, names):
    """Runs tests, repeats those that fail, and returns the best result of each test and subtest."""
    best, left = {}, names
    for attempt in range(1 + options.repeat):
        begun = time.monotonic()
        found = run(options, built, package, agent, left, options.folder / f"{part}.{agent}.{attempt}.log")
        failed = leaves(found)
        best |= {name: result for name, result in found.items()
                 if best.get(name) != PASS and (result != FAIL or name in failed)}
        left = [name for name in left if found[name] == FAIL]
        counts = ", ".join(f"{sum(found[name] == result for name in names if name in found)} {result}" for result in (PASS, FAIL, SKIP))
        print(f"{part} with {AGENTS[agent]}: {counts} in {(time.monotonic() - begun) / 60:.1f} min"
              + "".join(f"\n  fails: {name}" for name in failed), flush=True)
        if not left:
            break
    # If only subtests of a test failed, it passes once each of them has passed in some run.
    for name in names:
        best.setdefault(name, FAIL if leaves(best, f"{name}/") else PASS)
    return best


def leaves(found, name=""):
    """Returns the failed tests that have no failed subtest."""
    failed = {one for one, result in found.items() if result == FAIL and one.startswith(name)}
    return sorted(one for one in failed if not any(other.startswith(f"{one}/") for other in failed))


def summary(name, found):
    subtests = len(leaves(found, f"{name}/"))
    return f"{FAIL} ({subtests} subtests)" if subtests else found[name]


class Bare(Cluster):
    """A cluster without Istio, which the tests install."""

    def images(self, layout, agent, istio, control_plane, tools):
        tests = programs("istio/tests")
        keys = next(tests.glob("istio@*")) / "tests/testdata/certs/dns"
        for tag, files, variables in (("ours", {}, self.variables), ("go", go_agent(istio), ())):
            layout.add(f"{HUB}/proxyv2:{tag}", files, agent, variables=variables)
            add_istiod(layout, f"{HUB}/pilot:{tag}", control_plane)
            # The second image has Istio's echo server, too.
            for image in (f"{HUB}/app:{tag}", f"{GATEWAY_API}/echo-advanced:v1.5.1"):
                layout.add(image, {
                    "/usr/local/bin/server": tests / "server", "/usr/local/bin/client": tests / "client",
                    "/cert.crt": keys / "cert-chain.pem", "/cert.key": keys / "key.pem"},
                    Entrypoint=["/usr/local/bin/server"], User="1338", Env=["PATH=/usr/local/bin"])
            layout.add(f"{HUB}/app_sidecar_ubuntu_noble:{tag}", files, agent, machine(tests), variables,
                       Entrypoint=[], Cmd=[], User="1338", Env=["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"])
            for image in (f"{HUB}/ext-authz:{tag}", "registry.istio.io/testing/ext-authz:latest"):
                layout.add(image, {"/extauthz": tests / "extauthz"}, Entrypoint=["/extauthz"])
        for tag in ("v1.5.1", "v1.6.0-dev.2", "v1.6.0-dev.3"):
            layout.add(f"{GATEWAY_API}/echo-basic:{tag}", {"/echo-basic": tests / "echo-basic"}, Entrypoint=["/echo-basic"])
        layout.add("registry.k8s.io/coredns/coredns:v1.12.2", {"/coredns": tools / "coredns"}, Entrypoint=["/coredns"])
        layout.add("registry.istio.io/testing/jwt-server:0.8", {"/jwt-server": tests / "src"}, Entrypoint=["/jwt-server"])

    def install(self, istio):
        # Some tests expect that the conformance test, which is a separate part here, has installed the Gateway API.
        self.run("apply", "--server-side", "-f", istio / "gateway-api-crd.yaml")
        self.inside("ip", "route", "add", "10.98.0.0/16", "dev", "node")


def machine(tests):
    """Returns an archive with a machine's files: Debian, the echo server, and Istio's package without the agent."""
    archive = tests / "machine.tar"
    if archive.exists():
        return archive
    istio = next(tests.glob("istio@*"))
    with tempfile.TemporaryDirectory(dir=tests) as folder:
        root = pathlib.Path(folder) / "root"
        say("unpacking Debian for a machine; this happens once")
        subprocess.run(["debootstrap", "--variant=minbase", "--include=ca-certificates,curl,hostname,iproute2,iptables,procps,sudo",
                        "bookworm", root], stdout=sys.stderr, check=True)
        for source, place in ((tests / "server", "usr/local/bin"), (istio / "tools/packaging/common/istio-start.sh", "usr/local/bin"),
                              (istio / "tools/packaging/postinst.sh", "usr/local/bin"), (istio / "pkg/test/echo/docker/sudoers", "etc"),
                              (istio / "tools/packaging/common/sidecar.env", "var/lib/istio/envoy"),
                              *((path, "var/lib/istio") for path in (istio / "tests/testdata/certs").glob("cert.*"))):
            (root / place).mkdir(parents=True, exist_ok=True)
            shutil.copy(source, root / place)
        # The script of the package sets the modes of envoy and pilot-agent, which come from the agent's image. Empty
        # files take their place meanwhile.
        subprocess.run(["chroot", root, "sh", "-ec", """
            useradd --create-home --uid 1338 application
            chmod 755 /usr/local/bin/*
            chmod 440 /etc/sudoers
            touch /usr/local/bin/envoy /usr/local/bin/pilot-agent
            postinst.sh
            rm /usr/local/bin/envoy /usr/local/bin/pilot-agent /usr/local/bin/postinst.sh"""], check=True)
        subprocess.run(["tar", "-C", root, "-cf", f"{folder}/machine.tar", "."], check=True)
        os.rename(f"{folder}/machine.tar", archive)
    return archive


@contextlib.contextmanager
def addresses(cluster):
    """Gives each Service of type LoadBalancer an address, which kube-proxy serves on the node."""
    columns = "NAMESPACE:.metadata.namespace,NAME:.metadata.name,TYPE:.spec.type,IP:.status.loadBalancer.ingress"
    watch = subprocess.Popen([cluster.kubectl, "get", "services", "-A", "--watch", "--no-headers", "-o", f"custom-columns={columns}"],
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def give():
        given = 0
        for namespace, name, kind, address in (line.split(None, 3) for line in watch.stdout):
            if kind == "LoadBalancer" and address.strip() == "<none>":
                given += 1
                patch = f'{{"status":{{"loadBalancer":{{"ingress":[{{"ip":"10.98.{given // 250}.{given % 250 + 1}"}}]}}}}}}'
                # A Service that was deleted meanwhile needs no address.
                subprocess.run([cluster.kubectl, "-n", namespace, "patch", f"service/{name}", "--subresource=status", "-p", patch],
                               capture_output=True, check=False)
    thread = threading.Thread(target=give)
    thread.start()
    try:
        yield
    finally:
        watch.kill()
        thread.join()


def run(options, built, package, agent, names, log):
    """Runs tests of a package in a new cluster. Returns the results of tests and subtests by name."""
    cluster = Bare(options.folder / "cluster", options.variable)
    try:
        cluster.start(options.layout.resolve())
        source = options.folder / "source"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(next(built.glob("istio@*")), source)
        for path, old, new in EDITS:
            text = (source / path).read_text()
            if old not in text:
                raise RuntimeError(f"{path} lacks {old!r}")
            (source / path).write_text(text.replace(old, new))
        for script in source.glob("samples/**/*.sh"):
            script.chmod(0o755)
        with addresses(cluster), open(log, "w", encoding="utf-8") as output:
            subprocess.run(
                ["nsenter", "--target", str(cluster.first()), "--net", f"--wd={source}/tests/integration/{package}",
                 built / f"{package.rsplit('/')[-1]}.test", "-test.v", "-test.timeout=30m", f"-test.run=^({'|'.join(names)})$",
                 f"--istio.test.kube.config={cluster.folder}/kubeconfig", f"--istio.test.hub={HUB}", f"--istio.test.tag={agent}",
                 "--istio.test.pullpolicy=IfNotPresent", f"--istio.test.skipVM={package != 'pilot'}", "--istio.test.ci", "--istio.test.maxDumps=3",
                 f"--istio.test.work_dir={options.folder}/work"],
                env=os.environ | {"REPO_ROOT": str(source), "PATH": f"{built}:{cluster.folder}:{os.environ['PATH']}"},
                stdout=output, stderr=output, check=False)
    finally:
        cluster.stop()
    found = {name: result.lower() for result, name in re.findall(
        r"^\s*--- (PASS|FAIL|SKIP): (\S+) \(", log.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)}
    # A test without a result was running at the end, or the set-up failed.
    return {name: FAIL for name in names} | found


def read_list(source):
    """Returns the rows of the list, which must have each test of its packages."""
    with open(LIST, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for package in sorted({row["package"] for row in rows if row["test"] != "*"}):
        listed = {row["test"] for row in rows if row["package"] == package}
        present = {name for path in (source / "tests/integration" / package).glob("*_test.go")
                   for name in re.findall(r"^func (Test\w+)\(t ", path.read_text(), re.MULTILINE)}
        if listed != present:
            sys.exit(f"istio-tests: {LIST} and {package} differ: {', '.join(sorted(listed ^ present))}")
    return rows


def write_list(rows):
    with open(LIST, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
