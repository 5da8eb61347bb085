//! The name table as `/debug/ndsz` shows it: what istiod sent, in protobuf's JSON, and the short forms
//! made of it. Names with a search domain appended are left out, as in pilot-agent.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::NameTable;
use super::host::{Host, without_dot};

impl NameTable {
    /// All of the table, written host by host: a tree of the whole takes ten times the memory.
    pub fn to_json(&self) -> String {
        let (mut page, mut written) = (r#"{"table":{"#.to_owned(), HashSet::new());
        let mut write = |name: String, info: Value| {
            if written.contains(&name) {
                return;
            }
            let separator = if written.is_empty() { "" } else { "," };
            let key = Value::from(name.as_str());
            page.push_str(&format!("{separator}{key}:{info}"));
            written.insert(name);
        };
        for host in self.all() {
            write(text(host.name), info(&host));
        }
        for host in self.all() {
            for form in self.forms(&host) {
                if let Some(found) = self.addresses(form.as_bytes()) {
                    let v4 = found.v4.iter().map(ToString::to_string);
                    let ips: Vec<_> = v4.chain(found.v6.iter().map(ToString::to_string)).collect();
                    write(
                        format!("{form}."),
                        json!({ "ips": ips, "registry": "Kubernetes" }),
                    );
                }
            }
        }
        if written.is_empty() {
            return "{}".to_owned();
        }
        page.push_str("}}");
        page
    }

    /// The names of a host, lower case, without a dot at their end.
    fn forms(&self, host: &Host<'_>) -> Vec<String> {
        let mut forms = vec![lower(without_dot(host.name))];
        if self.has_short_forms(host) {
            let short = lower(host.short_name);
            let alias = format!("{short}.{}", lower(host.namespace));
            forms.push(format!("{alias}{}", self.domains.first_label));
            forms.push(alias);
            if host.namespace == self.domains.namespace.as_bytes() {
                forms.push(short);
            }
            forms.extend(host.alt_hosts().map(lower));
        }
        forms
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn lower(bytes: &[u8]) -> String {
    text(bytes).to_ascii_lowercase()
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
