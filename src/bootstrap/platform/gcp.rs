//! Google Cloud: told by `GCP_METADATA`, or asked from its metadata service.
//!
//! Does not use credentials, but asks for one.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use http::Method;
use zeroize::Zeroizing;

use super::http::{Answer, ask};
use super::{Config, LIMIT, Locality, Platform, SERVICE, present};

const PREFIX: &str = "/computeMetadata/v1";
const FLAVOR: (&str, &str) = ("Metadata-Flavor", "Google");
/// How long another machine than one of Google's may keep us waiting.
const DOUBT: Duration = Duration::from_millis(200);

/// How long a token may take, for which Google signs.
const TOKEN_LIMIT: Duration = Duration::from_secs(5);

/// What is known without asking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Static {
    pub project: String,
    pub project_number: String,
    pub cluster: String,
    pub location: String,
    pub quota_project: String,
    pub zone: String,
}

impl Static {
    /// Reads `project|number|cluster|location`.
    pub fn parse(text: &str, quota_project: String, zone: String) -> Option<Self> {
        let mut parts = text.split('|').map(str::to_owned);
        let metadata = Self {
            project: parts.next()?,
            project_number: parts.next()?,
            cluster: parts.next()?,
            location: parts.next()?,
            quota_project,
            zone,
        };
        parts.next().is_none().then_some(metadata)
    }
}

pub(super) async fn detected(config: &Config) -> bool {
    if config.gcp_host.is_some() {
        return true;
    }
    let name = fs::read_to_string(config.root.join("sys/class/dmi/id/product_name"));
    let named = name.is_ok_and(|name| name.trim().starts_with("Google"));
    let limit = if named { LIMIT } else { DOUBT };
    let answer = ask(SERVICE, Method::GET, "/", FLAVOR, limit).await;
    answer.is_some_and(|answer| {
        answer
            .headers
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
                metadata: told(known),
                locality: locality(&zone),
            }
        }
        None => asked(config, zone_of_names()).await,
    }
}

fn told(known: &Static) -> BTreeMap<String, String> {
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

async fn asked(config: &Config, zone_of_names: Option<String>) -> Platform {
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

/// A token by which this machine is known to `audience`.
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
    let answer: Answer = match &config.gcp_host {
        Some(host) if host.contains(':') => {
            ask(host.as_str(), Method::GET, &path, FLAVOR, limit).await?
        }
        Some(host) => ask((host.as_str(), 80), Method::GET, &path, FLAVOR, limit).await?,
        None => ask(SERVICE, Method::GET, &path, FLAVOR, limit).await?,
    };
    answer.good.then(|| answer.text.trim().to_owned())
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

/// Machines of Google look names up in `<zone>.c.<project>.internal`.
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
