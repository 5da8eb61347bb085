//! Reads region, zone and id of an AWS instance that has a role.

use std::time::Duration;

use http::Method;

use super::{Config, Locality, Platform, SERVICE, query, request, success};

const TOKEN: &str = "X-aws-ec2-metadata-token";
const ROLE: &str = "iam/info";
const SERVICE_V6: &str = "[fd00:ec2::254]";
/// The limit of one response.
pub(super) const LIMIT: Duration = Duration::from_millis(100);

const MEMBERS: [(&str, &str); 3] = [
    ("aws_region", "placement/region"),
    ("aws_availability_zone", "placement/availability-zone"),
    ("aws_instance_id", "instance-id"),
];

/// Returns true on an AWS instance that has a role. Queries both versions at once: a container may be too many
/// hops away for a token, and the older version may be switched off.
pub(super) async fn detect(config: &Config) -> bool {
    let (token, role) = tokio::join!(token(config), get(config, "", ROLE));
    let role = match role {
        None if !token.is_empty() => get(config, &token, ROLE).await,
        role => role,
    };
    role.is_some_and(|role| role.contains("arn:aws:iam"))
}

pub(super) async fn describe(config: &Config) -> Platform {
    let token = token(config).await;
    let metadata = query(&MEMBERS, |path| get(config, &token, path)).await;
    let locality = Locality {
        region: metadata.get("aws_region").cloned().unwrap_or_default(),
        zone: metadata.get("aws_availability_zone").cloned().unwrap_or_default(),
        ..Locality::default()
    };
    Platform { metadata, locality }
}

fn service(config: &Config) -> &'static str {
    if config.v6 { SERVICE_V6 } else { SERVICE }
}

/// Requests the token of IMDSv2. It is empty if there is none, which IMDSv1 accepts.
async fn token(config: &Config) -> String {
    let lifetime = ("X-aws-ec2-metadata-token-ttl-seconds", "60");
    let path = "/latest/api/token";
    success(request(service(config), Method::PUT, path, lifetime, LIMIT).await).unwrap_or_default()
}

async fn get(config: &Config, token: &str, path: &str) -> Option<String> {
    let path = format!("/latest/meta-data/{path}");
    success(request(service(config), Method::GET, &path, (TOKEN, token), LIMIT).await)
}
