//! The bootstrap of gRPC applications that speak discovery themselves.
//!
//! A file they find by `GRPC_XDS_BOOTSTRAP`: it names the agent's discovery socket and, when the
//! agent writes certificates to files, where those are. It stays when the agent ends.
//!
//! Does not write certificates.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::file::{make_directory, replace};
use super::{Error, node};

#[derive(Clone, Debug)]
pub struct Config {
    /// Where the file goes.
    pub path: PathBuf,
    pub xds_socket: PathBuf,
    /// Directory of certificates in files.
    pub certificates: Option<PathBuf>,
}

/// Writes the file next to its place and moves it there.
pub fn write(config: &Config, node: &node::Node) -> Result<(), Error> {
    if let Some(directory) = config.path.parent() {
        make_directory(directory)?;
    }
    replace(
        &config.path,
        &format!("{:#}", document(config, node)),
        0o644,
    )
}

fn document(config: &Config, node: &node::Node) -> Value {
    let (locality, metadata) = node::of_application(node);
    let socket = config
        .xds_socket
        .strip_prefix("./")
        .unwrap_or(&config.xds_socket);
    let mut document = json!({
        "xds_servers": [{
            "server_uri": format!("unix:///{}", socket.display()),
            "channel_creds": [{ "type": "insecure" }],
            "server_features": ["xds_v3"],
        }],
        "node": { "id": node.id, "metadata": metadata, "locality": locality.section() },
        "server_listener_resource_name_template": "xds.istio.io/grpc/lds/inbound/%s",
    });
    if let Some(directory) = &config.certificates {
        document["certificate_providers"] = json!({ "default": provider(directory) });
    }
    document
}

fn provider(directory: &Path) -> Value {
    let file = |name: &str| json!(directory.join(name).to_string_lossy());
    json!({ "plugin_name": "file_watcher", "config": {
        "certificate_file": file("cert-chain.pem"),
        "private_key_file": file("key.pem"),
        "ca_certificate_file": file("root-cert.pem"),
        "refresh_interval": "900s",
    }})
}
