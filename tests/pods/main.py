#!/usr/bin/env python3
"""Runs pods of every kind with the image, on this machine: `make pods`.

Everything happens in a network, mounts and processes of its own, which end with it. Needs root.
"""

import argparse
import asyncio
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "deploy")]
INSIDE = "PODS_INSIDE"


def main():
    options = parse_options()
    if INSIDE in os.environ:
        return asyncio.run(run(options))
    if os.getuid() != 0:
        print("pods: needs root; these tests are not run", file=sys.stderr)
        return 0
    if options.grpc and not options.grpc.is_dir():
        fetch(options.grpc)
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--",
               sys.executable, "-B", *sys.argv]
    return subprocess.run(command, env=os.environ | {INSIDE: "1"}, check=False).returncode


def parse_options():
    parser = argparse.ArgumentParser(description="Runs pods of every kind with the image.")
    add = lambda name, **more: parser.add_argument(name, type=pathlib.Path, **more)
    add("--image", required=True, help="OCI layout, or a root directory")
    add("--binaries", required=True, help="folder of local-istiod")
    add("--folder", default="target/pods", help="logs and resources")
    add("--proxyv2", help="Istio's own image, for the roll-back: OCI layout, or a root directory")
    add("--rendered", help="folder of pods that istioctl has rendered")
    add("--grpc", help="folder for the Python package grpcio")
    parser.add_argument("--only", help="part of the name of the claims to test")
    options = parser.parse_args()
    options.wants = lambda claim: not options.only or options.only in claim.__name__
    for name, value in vars(options).items():
        if isinstance(value, pathlib.Path):
            setattr(options, name, value.resolve() if value != pathlib.Path("") else None)
    return options


def fetch(folder):
    """Installs grpcio; without it the claim that needs it is not tested."""
    requirements = HERE.parent / "conformance/grpc/requirements.txt"
    draft = folder.with_suffix(".draft")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--root-user-action", "ignore",
               "--target", str(draft), "--requirement", str(requirements)]
    if subprocess.run(command, check=False).returncode == 0:
        draft.rename(folder)


async def run(options):
    import cases
    import runner_cases
    from world import World
    if options.grpc and not options.grpc.is_dir():
        options.grpc = None
    world = World(options)
    try:
        await world.start()
        kinds = cases.Mesh(world)
        await world.check(cases.each_kind_becomes_ready_by_its_own_probes, kinds)
        # What needs the machine for itself comes first, the rest runs side by side.
        for claim in filter(options.wants, (
                cases.native_sidecars_start_before_the_application_and_others_where_asked,
                cases.captured_requests_reach_each_kind_by_mutual_tls,
                cases.a_gateway_serves_a_captured_caller,
                cases.the_agent_answers_names_of_the_mesh)):
            await world.check(claim, kinds)
        await asyncio.gather(*(world.check(claim, kinds) for claim in filter(options.wants, (
            cases.a_rotated_token_reaches_the_agent,
            cases.a_changed_label_reaches_envoy,
            cases.replaced_pods_lose_no_request_and_the_way_back_is_the_same,
            cases.grpc_applications_talk_by_what_their_agents_relay,
            cases.a_waypoint_becomes_ready,
            cases.values_for_the_whole_mesh_swap_every_pod_and_the_memory_request_suffices,
            cases.other_authorities_get_rsa_keys_or_serve_certificates_themselves,
            runner_cases.pod_runner_gives_a_container_what_its_manifest_says,
            runner_cases.pod_runner_runs_what_it_is_given_and_refuses_what_it_does_not_know))))
        await asyncio.gather(*(world.check(claim, kinds) for claim in filter(options.wants, (
            cases.an_envoy_out_of_memory_ends_the_container_with_137_and_it_is_restarted,
            cases.rendered_pods_run_unchanged_but_for_image_names))))
        return world.sum_up()
    finally:
        await world.stop()


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    if INSIDE not in os.environ:
        print(f"pods: {time.monotonic() - started:.0f} s")
    sys.exit(code)
