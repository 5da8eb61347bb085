//! Azure: detected by the machine's vendor, and described by its metadata service.

use std::fs;

use http::Method;
use serde_json::Value;

use super::{Config, LIMIT, Locality, Platform, SERVICE, present, request};

const OLDEST_VERSION: &str = "2019-08-15";

pub(super) fn detected(config: &Config) -> bool {
    let vendor = fs::read_to_string(config.root.join("sys/class/dmi/id/sys_vendor"));
    vendor.is_ok_and(|vendor| vendor.contains("Microsoft Corporation"))
}

pub(super) async fn describe() -> Platform {
    let versions = get("/metadata/instance?").await;
    let newest = versions.as_ref().map_or(OLDEST_VERSION, newest);
    let instance = get(&format!("/metadata/instance?api-version={newest}")).await;
    instance
        .map(|instance| read(&instance["compute"]))
        .unwrap_or_default()
}

async fn get(path: &str) -> Option<Value> {
    let header = ("Metadata", "True");
    let answer = request(SERVICE, Method::GET, path, header, LIMIT).await?;
    // A refusal lists the versions there are.
    serde_json::from_slice(answer.body()).ok()
}

/// Dates, which sort as text.
fn newest(answer: &Value) -> &str {
    let versions = answer["newest-versions"].as_array().into_iter().flatten();
    let versions = versions.filter_map(Value::as_str);
    versions
        .chain([OLDEST_VERSION])
        .max()
        .unwrap_or(OLDEST_VERSION)
}

fn read(compute: &Value) -> Platform {
    let text = |name: &str| compute[name].as_str().unwrap_or_default().to_owned();
    let mut metadata = present([
        ("azure_name", text("name")),
        ("azure_location", text("location")),
        ("azure_vmId", text("vmId")),
    ]);
    let tags = tags(compute)
        .into_iter()
        .filter(|(name, _)| !name.is_empty());
    metadata.extend(tags.map(|(name, value)| (format!("azure_{name}"), value.to_owned())));
    Platform {
        metadata,
        locality: Locality {
            region: text("location"),
            zone: text("zone"),
            sub_zone: String::new(),
        },
    }
}

/// Tags: a list in newer versions, `k:v;k2:v2` in older ones.
fn tags(compute: &Value) -> Vec<(&str, &str)> {
    if let Some(list) = compute["tagsList"]
        .as_array()
        .filter(|list| !list.is_empty())
    {
        let list = list.iter();
        return list
            .filter_map(|tag| Some((tag["name"].as_str()?, tag["value"].as_str()?)))
            .collect();
    }
    let text = compute["tags"].as_str().unwrap_or_default();
    text.split(';')
        .filter_map(|tag| tag.split_once(':'))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_newest_version_is_requested() {
        assert_eq!(
            newest(&json!({"newest-versions": ["2021-02-01", "2020-09-01"]})),
            "2021-02-01"
        );
        assert_eq!(newest(&json!({"error": "no"})), OLDEST_VERSION);
    }

    #[test]
    fn an_instance_has_a_locality_and_tags() {
        let platform = read(&json!({
            "name": "vm", "location": "westeurope", "zone": "1", "vmId": "",
            "tags": "a:b;c:d:e;f",
        }));
        assert_eq!(platform.locality.region, "westeurope");
        assert_eq!(platform.locality.zone, "1");
        let metadata: Vec<_> = platform
            .metadata
            .iter()
            .map(|(k, v)| format!("{k}={v}"))
            .collect();
        let expected = [
            "azure_a=b",
            "azure_c=d:e",
            "azure_location=westeurope",
            "azure_name=vm",
        ];
        assert_eq!(metadata, expected);
        let listed = json!({"tags": "a:b", "tagsList": [{"name": "x", "value": "y"}]});
        assert_eq!(read(&listed).metadata.len(), 1);
    }
}
