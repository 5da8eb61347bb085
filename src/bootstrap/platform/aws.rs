//! AWS: a machine with an instance role knows its region, zone and id.
//!
//! Does not sign requests.

use std::net::SocketAddr;

use http::Method;

use super::http::ask;
use super::{CALL, Config, Locality, Platform, SERVICE, present};

const TOKEN: &str = "X-aws-ec2-metadata-token";
const ROLE: &str = "iam/info";

/// Asks in both versions at once: a container may be too many hops away for a token, and the older
/// version may be switched off.
pub(super) async fn detected(config: &Config) -> bool {
    let (token, role) = tokio::join!(token(config), get(config, "", ROLE));
    let role = match role {
        None if !token.is_empty() => get(config, &token, ROLE).await,
        role => role,
    };
    role.is_some_and(|role| role.contains("arn:aws:iam"))
}

pub(super) async fn describe(config: &Config) -> Platform {
    let token = token(config).await;
    let (region, zone, id) = tokio::join!(
        get(config, &token, "placement/region"),
        get(config, &token, "placement/availability-zone"),
        get(config, &token, "instance-id"),
    );
    Platform {
        locality: Locality {
            region: region.clone().unwrap_or_default(),
            zone: zone.clone().unwrap_or_default(),
            sub_zone: String::new(),
        },
        metadata: present([
            ("aws_region", region),
            ("aws_availability_zone", zone),
            ("aws_instance_id", id),
        ]),
    }
}

fn service(config: &Config) -> SocketAddr {
    if config.v6 {
        return ([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 80).into();
    }
    SERVICE
}

/// The second version of the service wants a token; the first does not mind an empty one.
async fn token(config: &Config) -> String {
    let lifetime = ("X-aws-ec2-metadata-token-ttl-seconds", "60");
    let answer = ask(
        service(config),
        Method::PUT,
        "/latest/api/token",
        lifetime,
        CALL,
    )
    .await;
    answer
        .filter(|answer| answer.good)
        .map(|answer| answer.text)
        .unwrap_or_default()
}

async fn get(config: &Config, token: &str, path: &str) -> Option<String> {
    let path = format!("/latest/meta-data/{path}");
    let answer = ask(service(config), Method::GET, &path, (TOKEN, token), CALL).await?;
    answer.good.then_some(answer.text)
}
