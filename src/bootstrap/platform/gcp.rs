//! Reads Google Cloud's metadata from `GCP_METADATA` or the metadata service, which also issues identity tokens.

use std::time::Duration;

use http::Method;
use zeroize::Zeroizing;

use super::{Config, Locality, Metadata, Platform, SERVICE};
use super::{present, query, request, success};
use crate::files::regular_file::{self, MAX_SETTINGS};

const FLAVOR: (&str, &str) = ("Metadata-Flavor", "Google");
/// The limit of detection on a machine whose product name is not Google's.
const DETECTION_LIMIT: Duration = Duration::from_millis(200);
/// The limit of one request. It is shorter than the limit of discovery, so that a missing member does not cost the others.
const MEMBER_LIMIT: Duration = Duration::from_secs(4);
/// The limit of a token, which Google signs.
const TOKEN_LIMIT: Duration = Duration::from_secs(5);

const MEMBERS: [(&str, &str); 9] = [
    ("gcp_project", "project/project-id"),
    ("gcp_project_number", "project/numeric-project-id"),
    ("gcp_location", "instance/attributes/cluster-location"),
    ("gcp_gke_cluster_name", "instance/attributes/cluster-name"),
    ("gcp_gce_instance", "instance/name"),
    ("gcp_gce_instance_id", "instance/id"),
    ("gcp_gce_instance_template", "instance/attributes/instance-template"),
    ("gcp_gce_instance_created_by", "instance/attributes/created-by"),
    ("gcp_zone", "instance/zone"),
];

/// Returns true if the machine's product name or the metadata service is Google's, or a host of it is configured.
pub(super) async fn detect(config: &Config) -> bool {
    let name = regular_file::read_kernel(config.root.join("sys/class/dmi/id/product_name"));
    if config.gcp_host.is_some() || name.is_ok_and(|name| name.trim().starts_with("Google")) {
        return true;
    }
    let response = request(SERVICE, Method::GET, "/", FLAVOR, DETECTION_LIMIT).await;
    response.is_some_and(|response| {
        let flavor = response.headers().get(FLAVOR.0);
        flavor.is_some_and(|flavor| flavor == FLAVOR.1)
    })
}

/// Names the parts of `GCP_METADATA`, a quota project and a zone. Each may be empty.
pub fn known(
    [project, number, cluster, location]: [String; 4],
    quota_project: String,
    zone: String,
) -> Metadata {
    present([
        ("gcp_project", project),
        ("gcp_project_number", number),
        ("gcp_gke_cluster_name", cluster),
        ("gcp_location", location),
        ("gcp_quota_project", quota_project),
        ("gcp_zone", zone),
    ])
}

pub(super) async fn describe(config: &Config) -> Platform {
    let (mut metadata, zone) = match &config.gcp {
        Some(known) => {
            (known.clone(), known.get("gcp_zone").cloned().or_else(|| zone_of_search_list(config)))
        }
        None => {
            let mut metadata = query(&MEMBERS, |path| get(config, path, MEMBER_LIMIT)).await;
            // `projects/<number>/zones/<zone>`
            let path = metadata.remove("gcp_zone");
            let zone = path.and_then(|path| path.rsplit('/').next().map(str::to_owned));
            if let Some(zone) = &zone {
                metadata.entry("gcp_location".to_owned()).or_insert_with(|| zone.clone());
            }
            let zone = zone_of_search_list(config).or(zone);
            if zone.is_none() {
                tracing::warn!(
                    "Google's metadata service did not return the zone; the node has no locality from it"
                );
            }
            (metadata, zone)
        }
    };
    if let Some(project) = metadata.get("gcp_project")
        && let Some(location) = metadata.get("gcp_location")
        && let Some(cluster) = metadata.get("gcp_gke_cluster_name")
    {
        let url = format!(
            "https://container.googleapis.com/v1/projects/{project}/locations/{location}\
             /clusters/{cluster}"
        );
        metadata.insert("gcp_gke_cluster_url".to_owned(), url);
    }
    Platform { locality: locality(&zone.unwrap_or_default()), metadata }
}

/// Requests a token that identifies this machine to `audience`.
pub(crate) async fn identity(config: &Config, audience: &str) -> Option<Zeroizing<String>> {
    let path =
        format!("instance/service-accounts/default/identity?audience={audience}&format=full");
    let token = Zeroizing::new(get(config, &path, TOKEN_LIMIT).await?);
    if token.is_empty() { None } else { Some(token) }
}

async fn get(config: &Config, path: &str, limit: Duration) -> Option<String> {
    let path = format!("/computeMetadata/v1/{path}");
    let host = config.gcp_host.as_deref().unwrap_or(SERVICE);
    Some(success(request(host, Method::GET, &path, FLAVOR, limit).await)?.trim().to_owned())
}

/// Returns the zone, and the region with which its name begins.
fn locality(zone: &str) -> Locality {
    let parts: Vec<_> = zone.split('-').collect();
    let mut locality = Locality::default();
    if let [area, region, letter] = parts[..]
        && ![area, region, letter].contains(&"")
    {
        locality.region = format!("{area}-{region}");
        zone.clone_into(&mut locality.zone);
    }
    locality
}

/// Finds the zone in the search domain `<zone>.c.<project>.internal` of Google's machines.
fn zone_of_search_list(config: &Config) -> Option<String> {
    let text = regular_file::read_text(&config.root.join("etc/resolv.conf"), MAX_SETTINGS).ok()?;
    let lists = text.lines().filter_map(|line| line.strip_prefix("search "));
    lists.flat_map(str::split_whitespace).find_map(|name| {
        let (zone, rest) = name.split_once(".c.")?;
        let project = rest.strip_suffix(".internal")?;
        let is_zone = zone.split('-').count() == 3 && !zone.contains('.');
        if is_zone && !project.is_empty() { Some(zone.to_owned()) } else { None }
    })
}
