//! Google Cloud: metadata from `GCP_METADATA` or the metadata service, which also issues identity tokens.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use http::Method;
use zeroize::Zeroizing;

use super::config::{Config, Platform, StaticGcp};
use super::request::{LIMIT, SERVICE, present, request, success};
use crate::bootstrap::locality::Locality;

const PREFIX: &str = "/computeMetadata/v1";
const FLAVOR: (&str, &str) = ("Metadata-Flavor", "Google");
/// Bound of detection on a machine whose product name is not Google's.
const DETECTION_LIMIT: Duration = Duration::from_millis(200);

/// Bound of a token, which Google signs.
const TOKEN_LIMIT: Duration = Duration::from_secs(5);

pub(super) async fn detected(config: &Config) -> bool {
    if config.gcp_host.is_some() {
        return true;
    }
    let name = fs::read_to_string(config.root.join("sys/class/dmi/id/product_name"));
    let named = name.is_ok_and(|name| name.trim().starts_with("Google"));
    let limit = if named { LIMIT } else { DETECTION_LIMIT };
    let answer = request(SERVICE, Method::GET, "/", FLAVOR, limit).await;
    answer.is_some_and(|answer| {
        answer
            .headers()
            .get(FLAVOR.0)
            .is_some_and(|flavor| flavor == FLAVOR.1)
    })
}

pub(super) async fn describe(config: &Config) -> Platform {
    let zone_of_names = || zone_of_search_list(config);
    match &config.gcp {
        Some(known) => {
            let zone = Some(known.zone.clone()).filter(|zone| !zone.is_empty());
            let zone = zone.or_else(zone_of_names).unwrap_or_default();
            Platform {
                metadata: known_metadata(known),
                locality: locality(&zone),
            }
        }
        None => queried(config, zone_of_names()).await,
    }
}

fn known_metadata(known: &StaticGcp) -> BTreeMap<String, String> {
    let text = |text: &String| Some(text.clone());
    present([
        ("gcp_project", text(&known.project)),
        ("gcp_project_number", text(&known.project_number)),
        ("gcp_gke_cluster_name", text(&known.cluster)),
        ("gcp_location", text(&known.location)),
        (
            "gcp_gke_cluster_url",
            cluster_url(&known.project, &known.location, &known.cluster),
        ),
        ("gcp_quota_project", text(&known.quota_project)),
        ("gcp_zone", text(&known.zone)),
    ])
}

async fn queried(config: &Config, zone_of_names: Option<String>) -> Platform {
    let get = |path: &'static str| get(config, path);
    let (project, number, location, cluster, name, id, template, creator, zone) = tokio::join!(
        get("project/project-id"),
        get("project/numeric-project-id"),
        get("instance/attributes/cluster-location"),
        get("instance/attributes/cluster-name"),
        get("instance/name"),
        get("instance/id"),
        get("instance/attributes/instance-template"),
        get("instance/attributes/created-by"),
        get("instance/zone"),
    );
    // `projects/<number>/zones/<zone>`
    let zone = zone.and_then(|path| path.rsplit('/').next().map(str::to_owned));
    let location = location.or_else(|| zone.clone());
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    let url = cluster_url(&part(&project), &part(&location), &part(&cluster));
    Platform {
        locality: locality(&zone_of_names.or(zone).unwrap_or_default()),
        metadata: present([
            ("gcp_project", project),
            ("gcp_project_number", number),
            ("gcp_location", location),
            ("gcp_gke_cluster_name", cluster),
            ("gcp_gke_cluster_url", url),
            ("gcp_gce_instance", name),
            ("gcp_gce_instance_id", id),
            ("gcp_gce_instance_template", template),
            ("gcp_gce_instance_created_by", creator),
        ]),
    }
}

/// A token that identifies this machine to `audience`.
pub(crate) async fn identity(config: &Config, audience: &str) -> Option<Zeroizing<String>> {
    let path =
        format!("instance/service-accounts/default/identity?audience={audience}&format=full");
    let token = Zeroizing::new(get_within(config, &path, TOKEN_LIMIT).await?);
    (!token.is_empty()).then_some(token)
}

async fn get(config: &Config, path: &str) -> Option<String> {
    get_within(config, path, LIMIT).await
}

async fn get_within(config: &Config, path: &str, limit: Duration) -> Option<String> {
    let path = format!("{PREFIX}/{path}");
    let host = config.gcp_host.as_deref().unwrap_or(SERVICE);
    let text = success(request(host, Method::GET, &path, FLAVOR, limit).await)?;
    Some(text.trim().to_owned())
}

fn cluster_url(project: &str, location: &str, cluster: &str) -> Option<String> {
    [project, location, cluster].iter().all(|part| !part.is_empty()).then(|| {
        format!(
            "https://container.googleapis.com/v1/projects/{project}/locations/{location}/clusters/{cluster}"
        )
    })
}

/// The zone, and the region its name begins with.
fn locality(zone: &str) -> Locality {
    let parts: Vec<_> = zone.split('-').collect();
    match parts.as_slice() {
        [area, region, letter] if !area.is_empty() && !region.is_empty() && !letter.is_empty() => {
            Locality {
                region: format!("{area}-{region}"),
                zone: zone.to_owned(),
                sub_zone: String::new(),
            }
        }
        _ => Locality::default(),
    }
}

/// The zone in the search domain `<zone>.c.<project>.internal` of Google's machines.
fn zone_of_search_list(config: &Config) -> Option<String> {
    let text = fs::read_to_string(config.root.join("etc/resolv.conf")).ok()?;
    let mut names = text
        .lines()
        .filter_map(|line| line.strip_prefix("search "))
        .flat_map(str::split_whitespace);
    names.find_map(|name| {
        let (zone, rest) = name.split_once(".c.")?;
        let project = rest.strip_suffix(".internal")?;
        let is_zone = zone.split('-').count() == 3 && !zone.contains('.');
        (is_zone && !project.is_empty()).then(|| zone.to_owned())
    })
}
