//! Writes the bootstrap of gRPC applications that are xDS clients themselves (proxyless).
//!
//! They find the file by `GRPC_XDS_BOOTSTRAP`. It names the agent's xDS socket and, if the agent writes
//! certificates to files, their directory. The agent does not remove it when it exits.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::document::without_nulls;
use super::file::write_file;
use super::node::Node;
use crate::problem::Problem;

#[derive(Clone, Debug)]
pub struct Config {
    pub path: PathBuf,
    pub xds_socket: PathBuf,
    pub certificates: Option<PathBuf>,
}

pub fn write(config: &Config, node: &Node) -> Result<(), Problem> {
    let path = &config.xds_socket;
    let socket = path.strip_prefix("./").unwrap_or(path);
    let document = without_nulls(json!({
        "xds_servers": [{
            "server_uri": format!("unix:///{}", socket.display()),
            "channel_creds": [{ "type": "insecure" }],
            "server_features": ["xds_v3"],
        }],
        "node": {
            "id": node.id,
            "metadata": node.application_metadata(),
            "locality": node.locality().section(),
        },
        "server_listener_resource_name_template": "xds.istio.io/grpc/lds/inbound/%s",
        "certificate_providers":
            config.certificates.as_deref().map(|path| json!({ "default": provider(path) })),
    }));
    write_file(&config.path, &format!("{document:#}"), 0o644)
}

fn provider(directory: &Path) -> Value {
    json!({ "plugin_name": "file_watcher", "config": {
        "certificate_file": directory.join("cert-chain.pem").to_string_lossy(),
        "private_key_file": directory.join("key.pem").to_string_lossy(),
        "ca_certificate_file": directory.join("root-cert.pem").to_string_lossy(),
        "refresh_interval": "900s",
    }})
}
