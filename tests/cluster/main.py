"""Runs the acceptance suite, in a cluster that it creates or in a user's: see `make cluster` in the Makefile."""

import argparse
import pathlib
import re
import secrets
import signal
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "deploy" / "cluster"))

import cases
import istiods  # Adds its cases.
import node  # Adds its cases.
import on_demand  # Adds its cases, and those of pods with a standby.
from cluster import APPLICATION, OURS_NAMES, Cluster
from compare import Comparison
from programs import ISTIODS, RELEASES
from world import GO, OURS, Failed, Skipped, World


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="logs, and the cluster that is made")
    parser.add_argument("--layout", type=pathlib.Path, help="the image, for a cluster that is made: an OCI layout")
    parser.add_argument("--suite", choices=["all", "gate", "none"], default="all")
    parser.add_argument("--istiod", choices=ISTIODS, default=ISTIODS[0])
    parser.add_argument("--kubernetes", choices=RELEASES, default=next(iter(RELEASES)))
    parser.add_argument("--context", help="a context of the user's kubeconfig, in place of a cluster that is made")
    parser.add_argument("--image", help="the image, as that cluster's nodes know it")
    parser.add_argument("--application", help="the image of the suite's application, likewise")
    parser.add_argument("--variable", action="append", default=[], help="sets NAME=VALUE in this agent's containers, in a cluster that is made")
    parser.add_argument("--only", default="", help="cases and measurements whose names match this regular expression")
    parser.add_argument("--write", type=pathlib.Path, help="compares with Go's agent instead, and writes this page")
    parser.add_argument("--agent", type=pathlib.Path, help="the agent, to be compared outside a pod")
    parser.add_argument("--envoy", type=pathlib.Path, help="its Envoy")
    parser.add_argument("--keep", action="store_true", help="leaves the cluster running")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options.folder = options.folder.resolve()
    return in_users_cluster(options) if options.context else in_own_cluster(options)


def in_own_cluster(options):
    cluster = Cluster(options.folder, options.variable)
    begun = time.monotonic()
    try:
        if not cluster.first():
            cluster.start(options.layout.resolve(), options.istiod, options.kubernetes)
            say(f"Kubernetes and istiod are up after {time.monotonic() - begun:.0f} s")
        world = World([cluster.kubectl], "suite", OURS_NAMES[0], APPLICATION, cluster, options.layout.resolve())
        return 0 if options.suite == "none" else suite(world, options)
    finally:
        if options.keep:
            say(f"it runs on; make cluster-stop ends it\n  {cluster.kubectl} get pods --all-namespaces")
        else:
            cluster.stop()


def in_users_cluster(options):
    if not options.image or not options.application:
        sys.exit("cluster: CONTEXT needs IMAGE and APPLICATION, images that the cluster's nodes can pull")
    namespace = f"istio-agent-suite-{secrets.token_hex(3)}"
    return suite(World(["kubectl", "--context", options.context], namespace, options.image, options.application), options)


def suite(world, options):
    world.kubectl("create", "namespace", world.namespace, fails=world.cluster is not None)
    try:
        world.kubectl("label", "--overwrite", f"namespace/{world.namespace}", "istio-injection=enabled")
        for client, agent in zip(cases.CLIENTS, (OURS, GO)):
            world.deploy(client, agent)
        world.rolled_out(*cases.CLIENTS)
        if options.write:
            return Comparison(world, options).all()
        failed = [run(world, number, claim, options) for number, gate, own, claim in cases.CASES
                  if (gate or options.suite == "all") and re.search(options.only, claim.__name__) and not skipped(world, own, claim)]
    finally:
        # A cluster that the suite has created is stopped, so its namespace need not be deleted.
        if not world.cluster and not options.keep:
            world.kubectl("delete", "namespace", world.namespace, fails=True)
    say(f"{failed.count(True)} of {len(failed)} cases failed")
    return int(any(failed))


def skipped(world, own, claim):
    if own and not world.cluster:
        say(f"skipped: {name(claim)}: touches istiod or the mesh, and the cluster is yours")
        return True
    return False


def run(world, number, claim, options):
    """Runs a case, and returns true if it fails."""
    begun = time.monotonic()
    try:
        told = claim(world)
    except Skipped as why:
        say(f"skipped: {number:2} {name(claim)}: {why}")
        return False
    except (Failed, RuntimeError, OSError, LookupError, ValueError) as why:
        say(f"FAILED  {number:2} {name(claim)} ({time.monotonic() - begun:.0f} s): {type(why).__name__}: {why}")
        folder = options.folder / "failures" / claim.__name__
        world.describe(folder)
        say(f"        logs are in {folder}")
        return True
    say(f"ok      {number:2} {name(claim)} ({time.monotonic() - begun:.0f} s){': ' + told if told else ''}")
    return False


def name(claim):
    return claim.__name__.replace("_", " ")


def say(text):
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
