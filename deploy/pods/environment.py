"""Environment variables, and what containers may learn of their pod (the downward API)."""

import math
import os
import re

from .manifest import Refused, quantity


def expand(text, values):
    """Replaces $(NAME) where NAME is known; $$ stands for a dollar sign."""
    def value(match):
        if match[0] == "$$":
            return "$"
        return values.get(match[1], match[0])
    return re.sub(r"\$\$|\$\(([^()]*)\)", value, text)


def environment(container, pod, image):
    """All variables of a container, those of its image first."""
    values = dict(one.split("=", 1) for one in image.environment)
    values["HOSTNAME"] = pod.name
    for variable in container.get("env", []):
        source = variable.get("valueFrom")
        if source is None:
            values[variable["name"]] = expand(variable.get("value", ""), values)
        elif (found := value_from(source, container, pod)) is not None:
            values[variable["name"]] = found
    return values


def value_from(source, container, pod):
    """The value a variable refers to; None if it is optional and missing."""
    if "fieldRef" in source:
        return field(source["fieldRef"]["fieldPath"], pod)
    if "resourceFieldRef" in source:
        return resource(source["resourceFieldRef"], container, pod)
    for name, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
        if key := source.get(name):
            files = pod.runner.files(kind, pod.namespace, key["name"]) or {}
            if key["key"] not in files and not key.get("optional"):
                raise Refused(f"{kind} {pod.namespace}/{key['name']} has no key {key['key']}")
            return files[key["key"]].decode() if key["key"] in files else None
    raise Refused(f"container {container['name']}: valueFrom is empty")


def field(path, pod):
    """A field of the pod, as a downward API spells it."""
    simple = {
        "metadata.name": pod.name, "metadata.namespace": pod.namespace, "metadata.uid": pod.uid,
        "spec.nodeName": pod.runner.node_name, "spec.serviceAccountName": pod.account,
        "status.hostIP": pod.runner.network.host, "status.hostIPs": pod.runner.network.host,
        "status.podIP": pod.address, "status.podIPs": pod.address}
    if path in simple:
        return simple[path]
    if path in ("metadata.labels", "metadata.annotations"):
        pairs = sorted(getattr(pod, path.split(".")[1]).items())
        return "\n".join(f"{name}={quoted(value)}" for name, value in pairs)
    if one := re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path):
        return getattr(pod, one[1]).get(one[2], "")
    raise Refused(f"fieldPath {path}: pod-runner does not know this field")


def quoted(text):
    """A string literal of Go."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return '"' + "".join(escapes.get(one, one) for one in text) + '"'


def resource(reference, container, pod):
    """A limit or request of the container, or what the machine has where there is no limit."""
    if name := reference.get("containerName"):
        container = pod.container(name).spec
    kind, _, name = reference["resource"].partition(".")
    machine = {"cpu": os.cpu_count(),
               "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    if kind not in ("limits", "requests") or name not in machine:
        raise Refused(f"resource {reference['resource']}: pod-runner does not know this resource")
    resources = container.get("resources", {})
    amount = resources.get(kind, {}).get(name, resources.get("limits", {}).get(name, machine[name]))
    # Kubernetes: a divisor of 0 is 1.
    divisor = quantity(reference.get("divisor", 1)) or 1
    return str(math.ceil(quantity(amount) / divisor - 1e-9))
