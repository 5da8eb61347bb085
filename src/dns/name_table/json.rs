//! The name table as `/debug/ndsz` shows it: what istiod sent, in protobuf's JSON.

use serde_json::{Value, json};

use super::NameTable;
use super::host::Host;

impl NameTable {
    /// All of the table, written host by host: a tree of the whole takes ten times the memory.
    pub fn to_json(&self) -> String {
        let mut page = "{".to_owned();
        for host in self.all() {
            let separator = if page.len() == 1 { r#""table":{"# } else { "," };
            page.push_str(&format!(
                "{separator}{}:{}",
                json!(text(host.name)),
                info(&host)
            ));
        }
        page.push_str(if page.len() == 1 { "}" } else { "}}" });
        page
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A `NameInfo`, without members that are empty.
fn info(host: &Host<'_>) -> Value {
    let members = [
        ("ips", host.ips().collect()),
        ("registry", text(host.registry).into()),
        ("shortname", text(host.short_name).into()),
        ("namespace", text(host.namespace).into()),
        ("altHosts", host.alt_hosts().map(text).collect()),
    ];
    let is_filled = |(_, value): &(&str, Value)| *value != json!("") && *value != json!([]);
    let filled = members.into_iter().filter(is_filled);
    filled
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}
