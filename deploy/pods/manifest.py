"""Reads manifests: what is not known here is refused by its path, never ignored."""

import base64
import re

import yaml


class Refused(Exception):
    """An input or a step that cannot be used: one sentence that names it."""


class Map:
    """A mapping from any string to strings."""


ANY = object()  # A field of Kubernetes without an effect on one machine.
TEXT, NUMBER, FLAG = (str,), (int,), (bool,)
TEXTS = [TEXT]
QUANTITY = (str, int, float)
PORT = (int, str)

METADATA = {"name": TEXT, "namespace": TEXT, "labels": Map, "annotations": Map, "uid": ANY,
            "creationTimestamp": ANY, "generation": ANY, "resourceVersion": ANY}
HTTP_GET = {"path": TEXT, "!port": PORT, "scheme": {"HTTP", "HTTPS"}, "host": TEXT,
            "httpHeaders": [{"!name": TEXT, "!value": TEXT}]}
PROBE = {"httpGet": HTTP_GET, "tcpSocket": {"!port": PORT, "host": TEXT},
         "exec": {"!command": TEXTS}, "initialDelaySeconds": NUMBER, "periodSeconds": NUMBER,
         "timeoutSeconds": NUMBER, "failureThreshold": NUMBER, "successThreshold": NUMBER}
HOOK = {"exec": {"!command": TEXTS}, "httpGet": HTTP_GET, "sleep": {"!seconds": NUMBER}}
FIELD = {"apiVersion": ANY, "!fieldPath": TEXT}
RESOURCE_FIELD = {"containerName": TEXT, "!resource": TEXT, "divisor": QUANTITY}
KEY = {"!name": TEXT, "!key": TEXT, "optional": FLAG}
ITEMS = [{"!key": TEXT, "!path": TEXT, "mode": NUMBER}]
FROM_MAP = {"!name": TEXT, "items": ITEMS, "optional": FLAG}
DOWNWARD = [{"!path": TEXT, "fieldRef": FIELD, "resourceFieldRef": RESOURCE_FIELD, "mode": NUMBER}]
TOKEN = {"!path": TEXT, "audience": ANY, "expirationSeconds": ANY}
VOLUME = {
    "!name": TEXT,
    "emptyDir": {"medium": {"", "Memory"}, "sizeLimit": QUANTITY},
    "downwardAPI": {"items": DOWNWARD, "defaultMode": NUMBER},
    "configMap": FROM_MAP | {"defaultMode": NUMBER},
    "secret": {"!secretName": TEXT, "items": ITEMS, "optional": FLAG, "defaultMode": NUMBER},
    "projected": {"defaultMode": NUMBER, "!sources": [{
        "serviceAccountToken": TOKEN, "downwardAPI": {"items": DOWNWARD}, "configMap": FROM_MAP,
        "secret": FROM_MAP}]},
}
IDENTITY = {"runAsUser": NUMBER, "runAsGroup": NUMBER, "runAsNonRoot": FLAG}
CONTAINER = {
    "!name": TEXT, "!image": TEXT, "imagePullPolicy": ANY, "command": TEXTS, "args": TEXTS,
    "env": [{"!name": TEXT, "value": TEXT, "valueFrom": {
        "fieldRef": FIELD, "resourceFieldRef": RESOURCE_FIELD, "configMapKeyRef": KEY,
        "secretKeyRef": KEY}}],
    "ports": [{"name": TEXT, "!containerPort": NUMBER, "protocol": {"TCP", "UDP"}}],
    "resources": {"limits": {"cpu": QUANTITY, "memory": QUANTITY}, "requests": ANY},
    "securityContext": IDENTITY | {
        "privileged": {False}, "readOnlyRootFilesystem": FLAG, "allowPrivilegeEscalation": FLAG,
        "capabilities": {"add": TEXTS, "drop": TEXTS}},
    "volumeMounts": [{"!name": TEXT, "!mountPath": TEXT, "readOnly": FLAG}],
    "startupProbe": PROBE, "readinessProbe": PROBE, "livenessProbe": PROBE,
    "lifecycle": {"postStart": HOOK, "preStop": HOOK}, "restartPolicy": {"Always"},
    "terminationMessagePath": ANY, "terminationMessagePolicy": ANY,
}
POD = {
    "!containers": [CONTAINER], "initContainers": [CONTAINER], "volumes": [VOLUME],
    "restartPolicy": {"Always", "OnFailure", "Never"}, "terminationGracePeriodSeconds": NUMBER,
    "serviceAccountName": TEXT, "serviceAccount": TEXT, "automountServiceAccountToken": ANY,
    "securityContext": IDENTITY | {
        "fsGroup": NUMBER, "supplementalGroups": [NUMBER],
        "sysctls": [{"!name": TEXT, "!value": TEXT}]},
    "hostAliases": [{"!ip": TEXT, "!hostnames": TEXTS}], "dnsPolicy": {"ClusterFirst"},
    "affinity": ANY, "enableServiceLinks": ANY, "imagePullSecrets": ANY, "nodeSelector": ANY,
    "priorityClassName": ANY, "schedulerName": ANY, "tolerations": ANY,
    "topologySpreadConstraints": ANY,
}
TEMPLATE = {"metadata": METADATA, "!spec": POD}
HEAD = {"apiVersion": TEXT, "!kind": TEXT, "!metadata": METADATA, "status": ANY}
KINDS = {
    "Pod": HEAD | TEMPLATE,
    "Deployment": HEAD | {"!spec": {
        "replicas": NUMBER, "selector": ANY, "strategy": ANY, "minReadySeconds": ANY,
        "progressDeadlineSeconds": ANY, "revisionHistoryLimit": ANY, "!template": TEMPLATE}},
    "ConfigMap": HEAD | {"data": Map},
    "Secret": HEAD | {"data": Map, "stringData": Map, "type": ANY},
    "ServiceAccount": HEAD | {"automountServiceAccountToken": ANY},
}


def read(text):
    """The pods of a manifest of any number of documents, and its ConfigMaps and Secrets, which are
    mappings from (kind, namespace, name) to files."""
    try:
        documents = [without_null(one) for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError as error:
        raise Refused(f"this is not YAML: {error}") from error
    pods, data = [], {}
    for document in documents:
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind not in KINDS:
            raise Refused(f"kind {kind!r} is not known, expected one of {', '.join(KINDS)}")
        check(document, KINDS[kind], kind)
        metadata = document["metadata"]
        if kind in ("Pod", "Deployment"):
            pods += pods_of(document)
        elif kind != "ServiceAccount":
            name = metadata.get("name", "")
            data[kind, metadata.get("namespace", "default"), name] = files_of(document)
    return pods, data


def pods_of(document):
    """Pods as documents of their own, with a name and a namespace."""
    metadata = document["metadata"]
    name = metadata.get("name") or missing(f"{document['kind']}.metadata.name")
    namespace = metadata.get("namespace", "default")
    if document["kind"] == "Pod":
        made = [(name, document)]
    else:
        template = document["spec"]["template"]
        made = [(f"{name}-{number}", template)
                for number in range(document["spec"].get("replicas", 1))]
    for name, template in made:
        own = {"labels": {}, "annotations": {}} | template.get("metadata", {})
        check_references(template["spec"], f"pod {name}")
        yield {"metadata": own | {"name": name, "namespace": namespace}, "spec": template["spec"]}


def check_references(spec, path):
    """Names within a pod refer to something, and no name is there twice."""
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    for what, things in (("container", containers), ("volume", spec.get("volumes", []))):
        names = [thing["name"] for thing in things]
        for name in names:
            if names.count(name) > 1:
                raise Refused(f"{path}: {what} {name} is there twice")
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    for container in containers:
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                raise Refused(f"{path}: container {container['name']} mounts the volume "
                              f"{mount['name']}, which the pod does not have")
    for container in spec["containers"]:
        if "restartPolicy" in container:
            raise Refused(f"{path}: container {container['name']} has restartPolicy, which only "
                          "init containers have")


def files_of(document):
    files = {name: text.encode() for name, text in document.get("stringData", {}).items()}
    for name, text in document.get("data", {}).items():
        is_secret = document["kind"] == "Secret"
        try:
            files[name] = base64.b64decode(text, validate=True) if is_secret else text.encode()
        except ValueError as error:
            raise Refused(f"Secret.data.{name} is not base64: {error}") from error
    return files


def without_null(value):
    """A field without a value is one that is not there."""
    if isinstance(value, dict):
        return {name: without_null(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_null(one) for one in value]
    return value


def check(value, schema, path):
    """Refuses what the schema does not have, by its path."""
    if schema is ANY:
        return
    if isinstance(schema, set):
        if not isinstance(value, (str, bool)) or value not in schema:
            allowed = ", ".join(map(repr, sorted(schema)))
            raise Refused(f"{path}: found {value!r}, expected one of {allowed}")
    elif isinstance(schema, tuple):
        if not isinstance(value, schema) or isinstance(value, bool) != (schema is FLAG):
            raise Refused(f"{path}: found {value!r}, expected {schema[0].__name__}")
    elif isinstance(schema, list):
        expect(value, list, path)
        for number, one in enumerate(value):
            check(one, schema[0], f"{path}[{number}]")
    elif schema is Map:
        for name, one in expect(value, dict, path).items():
            check(name, TEXT, path)
            check(one, TEXT, f"{path}.{name}")
    else:
        check_fields(value, schema, path)


def check_fields(value, schema, path):
    fields = {name.lstrip("!"): one for name, one in schema.items()}
    for name, one in expect(value, dict, path).items():
        if name not in fields:
            raise Refused(f"{path}.{name}: pod-runner does not know this field")
        check(one, fields[name], f"{path}.{name}")
    for name in schema:
        if name.startswith("!") and name[1:] not in value:
            missing(f"{path}.{name[1:]}")


def expect(value, kind, path):
    if not isinstance(value, kind):
        raise Refused(f"{path}: found {value!r}, expected a {'list' if kind is list else 'mapping'}")
    return value


def missing(path):
    raise Refused(f"{path} is missing")


SUFFIXES = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
            "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(value):
    """The number behind `500m`, `1Gi` and the like."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)(m|k|[MGT]i?|Ki)?", str(value))
    if not found:
        raise Refused(f"{value!r} is not a quantity, expected one like 500m or 128Mi")
    return float(found[1]) * SUFFIXES[found[2] or ""]
