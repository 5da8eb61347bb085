//! The bootstrap of gRPC applications that are xDS clients themselves (proxyless).
//!
//! They find the file by `GRPC_XDS_BOOTSTRAP`. It names the agent's xDS socket and, if the agent writes
//! certificates to files, their directory. The agent leaves it behind when it ends.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::file::{Error, write_file};
use super::node;

#[derive(Clone, Debug)]
pub struct Config {
    pub path: PathBuf,
    pub xds_socket: PathBuf,
    /// Directory of certificates in files.
    pub certificates: Option<PathBuf>,
}

pub fn write(config: &Config, node: &node::Node) -> Result<(), Error> {
    let text = format!("{:#}", document(config, node));
    write_file(&config.path, &text, 0o644)
}

fn document(config: &Config, node: &node::Node) -> Value {
    let (locality, metadata) = node::application(node);
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
