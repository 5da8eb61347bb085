//! The secrets Envoy is served, and how long they will do.
//!
//! Does not show keys, and has none.

use super::words::{moment, span};
use crate::agent::overview::html::{Html, Tone};
use crate::secrets::observe::{Certificate, Secret, Snapshot};

/// A bundle of roots may be long; the JSON has all.
const MOST: usize = 5;

/// What is left of the workload's certificate.
pub(super) fn state(html: &mut Html, snapshot: Option<&Snapshot>) {
    let Some(snapshot) = snapshot else {
        html.badge(Tone::Plain, "served by somebody else");
        return;
    };
    let leaf = snapshot.secrets.first();
    match leaf.and_then(|secret| secret.certificates.first()) {
        Some(leaf) => life(html, leaf, snapshot.problem.is_some()),
        None => {
            html.badge(Tone::Bad, "none yet");
        }
    }
}

pub(super) fn section(html: &mut Html, snapshot: Option<&Snapshot>) {
    let Some(snapshot) = snapshot else { return };
    html.section("Certificates", "certs", |html| {
        if let Some(problem) = &snapshot.problem {
            html.markup("<p>").badge(Tone::Bad, "no new certificate");
            html.markup(" ").text(&problem.error);
            html.note(&format!(
                "{} in a row, next attempt {} UTC",
                problem.failures,
                moment(&problem.next_attempt)
            ));
            html.markup("</p>\n");
        }
        html.list(&["Secret", "Left", "Expires"], |html| {
            for secret in &snapshot.secrets {
                rows(html, secret, snapshot.problem.is_some());
            }
        });
    });
}

fn rows(html: &mut Html, secret: &Secret, is_late: bool) {
    if secret.certificates.is_empty() {
        html.markup("<tr><td>").text(secret.name).markup("<td>");
        html.badge(Tone::Bad, "not there yet").markup("<td>\n");
    }
    for (place, certificate) in secret.certificates.iter().take(MOST).enumerate() {
        html.markup("<tr><td>").text(secret.name);
        match certificate.spiffe_ids.as_slice() {
            [] => html.note(&certificate.subject),
            ids => html.note(&ids.join(" ")),
        };
        html.markup("<td>");
        life(html, certificate, is_late);
        html.markup("<td data-of=Expires>")
            .text(&moment(&certificate.not_after))
            .markup(" UTC");
        if let Some(renewal) = secret.next_renewal.as_deref().filter(|_| place == 0) {
            html.note(&format!("renewal {} UTC", moment(renewal)));
        }
        html.markup("\n");
    }
    if let Some(more) = secret.certificates.len().checked_sub(MOST + 1) {
        html.markup("<tr><td>")
            .text(&format!("and {} more", more + 1));
        html.markup("<td><td>\n");
    }
}

fn life(html: &mut Html, certificate: &Certificate, is_late: bool) {
    let left = certificate.remaining_seconds;
    if left <= 0.0 {
        html.badge(Tone::Bad, &format!("expired {} ago", span(-left)));
        return;
    }
    let tone = if is_late { Tone::Warn } else { Tone::Good };
    html.badge(tone, &format!("{} left", span(left)));
}
