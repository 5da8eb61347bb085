//! `--verify`: says in words how the live rules differ from those of these arguments.

use super::{Error, Report};
use crate::capture::iptables::apply::Request;
use crate::capture::verify::{Finding, live};
use crate::exit_code::ExitCode;

/// What the findings say, and whether traffic may go elsewhere.
pub(super) async fn verify(request: &Request<'_>, is_native: bool) -> Result<Report, Error> {
    let findings = live::findings(request, is_native).await?;
    let misleads = findings.iter().any(Finding::misleads);
    let summary = match (findings.is_empty(), misleads) {
        (true, _) => "The rules are those that these arguments ask for: traffic is captured.",
        (false, false) => {
            "Traffic is captured as these arguments ask; these differences do not keep it from that:"
        }
        (false, true) => "Traffic may not be captured as these arguments ask:",
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
