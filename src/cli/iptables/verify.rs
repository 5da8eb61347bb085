//! `--verify`: says in words how the live rules differ from those of these arguments.

use super::machine::number;
use super::{Error, Report};
use crate::capture::iptables::apply::Request;
use crate::capture::layout::Layout;
use crate::capture::nftables::{self, Live};
use crate::capture::rules::{Family, Rules};
use crate::capture::verify::{Finding, compare};
use crate::exit_code::ExitCode;

/// What the findings say, and whether traffic goes where it should.
pub(super) async fn verify(request: &Request<'_>, is_native: bool) -> Result<Report, Error> {
    let findings = findings(request, is_native).await?;
    let misleads = findings.iter().any(Finding::misleads);
    let summary = match (findings.is_empty(), misleads) {
        (true, _) => "The rules are those that these arguments ask for: traffic is captured.",
        (false, false) => {
            "Traffic is captured as these arguments ask; these differences do not keep it from that:"
        }
        (false, true) => "Traffic is not captured as these arguments ask:",
    };
    let lines = findings.iter().map(|finding| format!("\n  {finding}"));
    Ok(Report {
        text: summary.to_owned() + &lines.collect::<String>(),
        code: match misleads {
            true => ExitCode::CaptureDiffers,
            false => ExitCode::Success,
        },
    })
}

/// How the live rules differ from those that a configuration asks for.
pub(super) async fn findings(
    request: &Request<'_>,
    is_native: bool,
) -> Result<Vec<Finding>, Error> {
    let rules = Rules::new(request.config);
    let (wanted, found) = match is_native {
        true => (nftables::wanted(&rules), nftables::live().await?),
        false => {
            let [v4, v6] = [Family::V4, Family::V6];
            let wanted = Live {
                v4: Layout::new(&rules, v4),
                v6: Layout::new(&rules, v6),
            };
            let found = Live {
                v4: request.live(v4).await?,
                v6: request.live(v6).await?,
            };
            (wanted, found)
        }
    };
    let of = |family, mut wanted: Layout, found| {
        wanted.resolve(number);
        compare(&wanted, found, family)
    };
    let Live { v4, v6 } = wanted;
    let mut findings = of(Family::V4, v4, &found.v4);
    findings.extend(of(Family::V6, v6, &found.v6));
    Ok(findings)
}
