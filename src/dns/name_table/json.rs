//! Renders the name table for `/debug/ndsz`: istiod's hosts in protobuf's JSON, and their short forms.
//! Names with a search domain appended are left out, as in pilot-agent.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::host::{self, Host};
use super::{Kind, NameTable};

impl NameTable {
    /// Renders the table host by host: a JSON tree of it would take ten times the memory.
    pub fn to_json(&self) -> String {
        let hosts = host::hosts(&self.encoded).map_while(Result::ok);
        let received = hosts.map(|host| (host.name.to_owned(), info(&host)));
        let hosts = host::hosts(&self.encoded).map_while(Result::ok);
        let resolved_forms = hosts.flat_map(|host| self.forms(&host)).filter_map(|form| {
            let resolved = self.addresses(form.as_bytes())?;
            let v4 = resolved.v4.iter().map(ToString::to_string);
            let ips: Vec<_> = v4.chain(resolved.v6.iter().map(ToString::to_string)).collect();
            Some((format!("{form}."), json!({ "ips": ips, "registry": "Kubernetes" })))
        });
        let mut page = r#"{"table":{"#.to_owned();
        let mut written = HashSet::new();
        for (name, info) in received.chain(resolved_forms) {
            if !written.contains(&name) {
                let separator = if written.is_empty() { "" } else { "," };
                page += &format!("{separator}{}:{info}", Value::from(name.as_str()));
                written.insert(name);
            }
        }
        if written.is_empty() {
            return "{}".to_owned();
        }
        page + "}}"
    }

    /// Returns the names of a host, `shortname.namespace` also with the first label of the domain.
    fn forms(&self, host: &Host<'_>) -> Vec<String> {
        let mut forms = Vec::new();
        for (kind, name) in self.names_of(host) {
            let name = String::from_utf8_lossy(&name).into_owned();
            if kind == Kind::ShortNamespace {
                forms.push(format!("{name}{}", self.domains.svc_label));
            }
            forms.push(name);
        }
        forms
    }
}

/// Converts a `NameInfo` to JSON, without empty members.
fn info(host: &Host<'_>) -> Value {
    let members: [(&str, Value); 5] = [
        ("ips", host.ips().collect()),
        ("registry", host.registry.into()),
        ("shortname", host.short_name.into()),
        ("namespace", host.namespace.into()),
        ("altHosts", host.alt_hosts().collect()),
    ];
    members
        .into_iter()
        .filter(|(_, value)| *value != json!("") && *value != json!([]))
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}
