//! Renders the name table for `/debug/ndsz`: istiod's hosts in protobuf's JSON, and their short forms.
//! Names with a search domain appended are left out, as in pilot-agent.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::NameTable;
use super::host::{Host, without_dot};

impl NameTable {
    /// Renders the table host by host: a JSON tree of it would take ten times the memory.
    pub fn to_json(&self) -> String {
        let hosts = self.all().map(|host| (text(host.name), info(&host)));
        let forms = self.all().flat_map(|host| self.forms(&host));
        let resolved_forms = forms.filter_map(|form| {
            let resolved = self.addresses(form.as_bytes())?;
            let v4 = resolved.v4.iter().map(ToString::to_string);
            let v6 = resolved.v6.iter().map(ToString::to_string);
            let ips: Vec<_> = v4.chain(v6).collect();
            let info = json!({ "ips": ips, "registry": "Kubernetes" });
            Some((format!("{form}."), info))
        });
        let (mut page, mut written) = (r#"{"table":{"#.to_owned(), HashSet::new());
        for (name, info) in hosts.chain(resolved_forms) {
            if !written.contains(&name) {
                let separator = if written.is_empty() { "" } else { "," };
                let key = Value::from(name.as_str());
                page += &format!("{separator}{key}:{info}");
                written.insert(name);
            }
        }
        if written.is_empty() {
            return "{}".to_owned();
        }
        page + "}}"
    }

    /// Returns the names of a host, lower case, without a dot at their end.
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

/// Converts a `NameInfo` to JSON, without empty members.
fn info(host: &Host<'_>) -> Value {
    let members: [(&str, Value); 5] = [
        ("ips", host.ips().collect()),
        ("registry", text(host.registry).into()),
        ("shortname", text(host.short_name).into()),
        ("namespace", text(host.namespace).into()),
        ("altHosts", host.alt_hosts().map(text).collect()),
    ];
    members
        .into_iter()
        .filter(|(_, value)| *value != json!("") && *value != json!([]))
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}
