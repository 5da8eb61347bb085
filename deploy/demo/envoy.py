"""Reads configuration and certificates from an Envoy's admin port. Changes nothing.
"""

import json
import urllib.request

# Name of each type, and the members of the configuration dump that contain its resources.
KINDS = [
    ("listeners", "dynamic_listeners", "active_state"),
    ("routes", "dynamic_route_configs", None),
    ("clusters", "dynamic_active_clusters", None),
    ("endpoints", "dynamic_endpoint_configs", None),
    ("secrets", "dynamic_active_secrets", None),
]
INNER = {"listeners": "listener", "routes": "route_config", "clusters": "cluster",
         "endpoints": "endpoint_config", "secrets": "secret"}


class Admin:
    def __init__(self, port):
        self.address = f"http://127.0.0.1:{port}"

    def get(self, path):
        with urllib.request.urlopen(self.address + path, timeout=5) as answer:
            return answer.read().decode()

    def state(self):
        """Returns Envoy's state, such as LIVE, or None while the admin port is closed."""
        try:
            return json.loads(self.get("/server_info"))["state"]
        except (OSError, ValueError):
            return None

    def version(self):
        return json.loads(self.get("/server_info"))["version"].split("/")[1]

    def accepted(self):
        """Returns the resources that Envoy has accepted over discovery: kind -> [(name, version)]."""
        dump = json.loads(self.get("/config_dump?include_eds"))
        found = {}
        for kind, member, state in KINDS:
            entries = [entry for part in dump["configs"] for entry in part.get(member, [])]
            found[kind] = sorted(describe(kind, entry, state) for entry in entries)
        return found

    def certificate(self):
        """Returns serial number, identity and expiry of the workload certificate, or None if Envoy has none."""
        for entry in json.loads(self.get("/certs"))["certificates"]:
            for leaf in entry.get("cert_chain", []):
                names = [name["uri"] for name in leaf.get("subject_alt_names", []) if "uri" in name]
                if names:
                    return {"serial": serial(leaf["serial_number"]), "identity": names[0],
                            "expires": leaf["expiration_time"]}
        return None


def describe(kind, entry, state):
    held = entry.get(state, {}) if state else entry
    inner = held.get(INNER[kind], {})
    name = inner.get("name") or inner.get("cluster_name") or entry.get("name", "?")
    return name, held.get("version_info", "")


def serial(text):
    """Returns a serial number as lower-case hexadecimal without leading zeros."""
    return text.replace(":", "").lower().lstrip("0") or "0"


def short(number):
    return f"{number[:8]}…" if len(number) > 9 else number
