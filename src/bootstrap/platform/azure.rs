//! Detects Azure by the machine's vendor, and queries its metadata service.

use http::Method;
use serde_json::Value;

use super::{Config, LIMIT, Locality, Platform, SERVICE, present, request, success};

use crate::files::regular_file;

/// The version that pilot-agent uses if it finds no newer one. It has all members that are read here.
const INSTANCE: &str = "/metadata/instance?api-version=2019-08-15";

/// Returns true if the machine's vendor is Microsoft.
pub(super) fn detect(config: &Config) -> bool {
    let vendor = regular_file::read_kernel(config.root.join("sys/class/dmi/id/sys_vendor"));
    vendor.is_ok_and(|vendor| vendor.contains("Microsoft Corporation"))
}

pub(super) async fn describe() -> Platform {
    let response = request(SERVICE, Method::GET, INSTANCE, ("Metadata", "True"), LIMIT).await;
    let instance = success(response).and_then(|text| serde_json::from_str::<Value>(&text).ok());
    // Without an instance all members are missing, which makes an empty platform.
    read(&instance.unwrap_or_default()["compute"])
}

fn read(compute: &Value) -> Platform {
    let [name, location, id, zone] = ["name", "location", "vmId", "zone"]
        .map(|member| compute[member].as_str().unwrap_or_default().to_owned());
    let mut metadata =
        present([("azure_name", name), ("azure_location", location.clone()), ("azure_vmId", id)]);
    // Older versions of the service have the tags as one text.
    let tags = compute["tags"].as_str().unwrap_or_default();
    if compute.get("tagsList").is_none() && !tags.is_empty() {
        for tag in tags.split(';') {
            let (name, value) = tag.split_once(':').unwrap_or((tag, ""));
            metadata.insert(format!("azure_{name}"), value.to_owned());
        }
    }
    for tag in compute["tagsList"].as_array().into_iter().flatten() {
        if let (Some(name), Some(value)) = (tag["name"].as_str(), tag["value"].as_str()) {
            metadata.insert(format!("azure_{name}"), value.to_owned());
        }
    }
    Platform { metadata, locality: Locality { region: location, zone, ..Locality::default() } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_instance_has_a_locality_and_tags() {
        let platform = read(&json!({
            "name": "vm", "location": "westeurope", "zone": "1", "vmId": "",
            "tagsList": [{"name": "a", "value": "b"}, {"name": "c", "value": "d:e"}, "f"],
        }));
        assert_eq!(platform.locality.region, "westeurope");
        assert_eq!(platform.locality.zone, "1");
        let metadata: Vec<_> = platform.metadata.iter().map(|(k, v)| format!("{k}={v}")).collect();
        let expected = ["azure_a=b", "azure_c=d:e", "azure_location=westeurope", "azure_name=vm"];
        assert_eq!(metadata, expected);
    }

    #[test]
    fn the_older_form_of_tags_is_read_where_there_is_no_list() {
        for (compute, expected) in [
            (
                json!({"tags": "a:b;c:d:e;f"}),
                vec![("azure_a", "b"), ("azure_c", "d:e"), ("azure_f", "")],
            ),
            (json!({"tags": "a:b", "tagsList": []}), vec![]),
            (json!({"tags": "a:b", "tagsList": null}), vec![]),
            (json!({"tags": ""}), vec![]),
            (json!({"tags": null}), vec![]),
        ] {
            let metadata = read(&compute).metadata;
            let found = metadata.iter().map(|(k, v)| (k.as_str(), v.as_str()));
            assert_eq!(found.collect::<Vec<_>>(), expected, "{compute}");
        }
    }
}
