//! A real container registry (docker-registry).

use std::path::Path;
use std::process::Command;

use aws_lc_rs::digest::{SHA256, digest};
use serde_json::json;
use tempfile::TempDir;

use super::process::Process;
use super::{eventually, free_port, local};

/// A user of the registry with its password. The bcrypt hash of the password is a published test vector.
const USER: &str = "team:U*U";
const HASHED: &str = "team:$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW\n";

/// A registry with TLS that admits only [`USER`].
pub struct Registry {
    /// The running registry; None while it is stopped.
    pub process: Option<Process>,
    command: Command,
    directory: TempDir,
    pub authority: String,
}

impl Registry {
    pub async fn start(binary: &Path) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).display().to_string();
        let own = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
        std::fs::write(path("cert.pem"), own.cert.pem()).unwrap();
        std::fs::write(path("key.pem"), own.signing_key.serialize_pem()).unwrap();
        std::fs::write(path("users"), HASHED).unwrap();
        let authority = local(free_port()).to_string();
        let config = json!({
            "version": 0.1,
            "storage": { "filesystem": { "rootdirectory": path("data") } },
            "http": { "addr": authority, "tls": { "certificate": path("cert.pem"), "key": path("key.pem") } },
            "auth": { "htpasswd": { "realm": "Registry", "path": path("users") } },
        });
        std::fs::write(path("config.yml"), config.to_string()).unwrap();
        let mut command = Command::new(binary);
        command.arg("serve").arg(path("config.yml")).env_clear();
        let mut registry = Self { process: None, command, directory, authority };
        registry.resume().await;
        registry
    }

    pub async fn resume(&mut self) {
        let log = self.directory.path().join("registry.log");
        self.process = Some(Process::start(&mut self.command, &log));
        eventually("a registry", async || self.curl("", &[]).ok()).await;
    }

    /// Sends a request for a path below `/v2/` or for a URL, and returns head and body of the response.
    fn curl(&self, path: &str, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new("curl");
        command.args(["-sSfkL", "-i", "-u", USER]).args(arguments);
        let path = if path.starts_with("https:") {
            path.to_owned()
        } else {
            format!("https://{}/v2/{path}", self.authority)
        };
        let output = command.arg(path).output().map_err(|error| error.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// Uploads a module with this tag, and returns the digest of its manifest.
    pub fn push(&self, tag: &str, module: &[u8]) -> String {
        let file = self.directory.path().join("upload");
        let data = format!("@{}", file.display());
        let upload = |bytes: &[u8]| {
            std::fs::write(&file, bytes).unwrap();
            let begun = self.curl("plugin/blobs/uploads/", &["-X", "POST"]).unwrap();
            let mut lines = begun.lines().filter_map(|line| line.split_once(": "));
            let (_, location) =
                lines.find(|(name, _)| name.eq_ignore_ascii_case("location")).unwrap();
            let joint = if location.contains('?') { '&' } else { '?' };
            let location = format!("{location}{joint}digest=sha256:{}", sha256(bytes));
            let stream = "content-type: application/octet-stream";
            self.curl(&location, &["-X", "PUT", "-H", stream, "--data-binary", &data]).unwrap();
            json!({ "digest": format!("sha256:{}", sha256(bytes)), "size": bytes.len() })
        };
        let [mut config, mut layer] = [upload(b"{}"), upload(module)];
        config["mediaType"] = json!("application/vnd.module.wasm.config.v1+json");
        layer["mediaType"] = json!("application/vnd.module.wasm.content.layer.v1+wasm");
        let oci = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": oci,
            "config": config,
            "layers": [config, layer],
        });
        let manifest = manifest.to_string();
        std::fs::write(&file, &manifest).unwrap();
        let kind = format!("content-type: {oci}");
        let put = ["-X", "PUT", "-H", &kind, "--data-binary", &data];
        self.curl(&format!("plugin/manifests/{tag}"), &put).unwrap();
        sha256(manifest.as_bytes())
    }

    pub fn url(&self, version: &str) -> String {
        format!("oci://{}/plugin{version}", self.authority)
    }

    pub fn pull_secret(&self) -> String {
        json!({ "auths": { &self.authority: { "auth": "dGVhbTpVKlU=" } } }).to_string()
    }
}

fn sha256(bytes: &[u8]) -> String {
    let digest = digest(&SHA256, bytes);
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
