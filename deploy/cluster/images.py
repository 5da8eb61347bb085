"""Creates images of programs that need no other files, without a registry."""

import hashlib
import io
import json
import pathlib
import shutil
import tarfile

TYPE = "application/vnd.oci.image."


class Layout:
    """An OCI layout with any number of images, in the form that `ctr images import` reads from an archive."""

    def __init__(self, folder):
        self.folder, self.manifests = folder, []
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, kind, data):
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": TYPE + kind, "digest": f"sha256:{digest}", "size": len(data)}

    def add(self, name, files, base=None, archive=None, variables=(), **config):
        """Adds an image with files by their paths. A string in place of a file is the target of a symbolic link. The
        layers of the layout `base` and of the tar archive `archive` come first, if they are given. Its processes have
        the environment variables of `base` and `variables`."""
        layers, whole = [], {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": []}}
        if base:
            read = lambda one: json.loads((base / "blobs" / one["digest"].replace(":", "/")).read_text())
            manifest = read(json.loads((base / "index.json").read_text())["manifests"][0])
            whole, layers = read(manifest["config"]), manifest["layers"]
            for one in layers:
                place = pathlib.Path("blobs") / one["digest"].replace(":", "/")
                shutil.copyfile(base / place, self.folder / place)
        for data in (*([archive.read_bytes()] if archive else []), *([layer(files)] if files else [])):
            layers = [*layers, self.blob("layer.v1.tar", data)]
            whole["rootfs"]["diff_ids"].append(layers[-1]["digest"])
            whole.pop("history", None)
        whole["config"] |= config
        whole["config"]["Env"] = [*whole["config"].get("Env", ()), *variables]
        manifest = self.blob("manifest.v1+json", json.dumps({
            "schemaVersion": 2, "mediaType": TYPE + "manifest.v1+json", "layers": layers,
            "config": self.blob("config.v1+json", json.dumps(whole).encode())}).encode())
        self.manifests.append(manifest | {"annotations": {"io.containerd.image.name": name}})
        index = {"schemaVersion": 2, "manifests": self.manifests}
        (self.folder / "index.json").write_text(json.dumps(index))


def layer(files):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for path, source in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.mode = 0o755
            if isinstance(source, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, source
                tar.addfile(entry)
            else:
                entry.size = source.stat().st_size
                with open(source, "rb") as file:
                    tar.addfile(entry, file)
    return data.getvalue()
