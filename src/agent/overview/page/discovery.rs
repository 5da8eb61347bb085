//! What istiod has sent to Envoy, and what Envoy said to it.
//!
//! Does not show resources.

use super::words::{counted, moment, resource_type, size, span};
use crate::agent::overview::html::{Html, Tone};
use crate::xds::observe::{NackSnapshot, Snapshot, StreamSnapshot, TypeSnapshot};

/// What became of a type's last response.
#[derive(Clone, Copy, Debug)]
enum Answer<'a> {
    /// Nothing was sent.
    None,
    Awaited,
    Accepted {
        after: f64,
    },
    Refused(&'a NackSnapshot),
}

/// Whether Envoy has taken all it was sent.
pub(super) fn state(html: &mut Html, snapshot: &Snapshot) {
    let mut answers = snapshot.types.values().map(answer);
    let refused = answers
        .clone()
        .filter(|answer| matches!(answer, Answer::Refused(_)))
        .count();
    match refused {
        0 if answers.any(|answer| matches!(answer, Answer::Accepted { .. })) => {
            html.badge(Tone::Good, "accepted")
        }
        0 => html.badge(Tone::Warn, "none yet"),
        some => html.badge(Tone::Bad, &format!("{} refused", counted(some, "type"))),
    };
}

pub(super) fn section(html: &mut Html, snapshot: &Snapshot) {
    html.wide_section("Discovery (xDS)", "xdsz", |html| {
        html.markup("<p>");
        stream(html, snapshot.stream.as_ref());
        if let (None, Some(end)) = (&snapshot.stream, &snapshot.last_end) {
            html.note(&format!("{} UTC: {}", moment(&end.at), end.reason));
        }
        html.markup("</p>\n");
        html.list(
            &["Type", "Version", "Last answer", "Last response"],
            |html| {
                for (url, of_type) in &snapshot.types {
                    row(html, url, of_type);
                }
            },
        );
    });
}

fn stream(html: &mut Html, stream: Option<&StreamSnapshot>) {
    match stream {
        None => {
            html.badge(Tone::Bad, "no stream of Envoy");
        }
        Some(stream) => {
            match stream.connected {
                true => html.badge(Tone::Good, "stream tied to istiod"),
                false => html.badge(Tone::Warn, "stream waits for istiod"),
            };
            html.note(&format!(
                "{}, number {}, since {} UTC",
                stream.protocol,
                stream.id,
                moment(&stream.since)
            ));
        }
    }
}

fn row(html: &mut Html, url: &str, of_type: &TypeSnapshot) {
    let (short, name) = resource_type(url);
    html.markup("<tr><td><span title=\"")
        .text(url)
        .markup("\">");
    html.text(short.unwrap_or(name)).markup("</span>");
    if short.is_some() {
        html.note(name);
    }
    let response = of_type.last_response.as_ref();
    html.markup("<td data-of=Version>")
        .text(response.map_or("", |response| &response.version));
    html.markup("<td>");
    said(html, of_type);
    html.markup("<td>");
    if let Some(response) = response {
        html.text(&span(response.age_seconds)).markup(" ago");
        let resources = counted(response.resources as usize, "resource");
        html.note(&format!("{resources}, {}", size(response.bytes)));
    }
    html.markup("\n");
}

fn said(html: &mut Html, of_type: &TypeSnapshot) {
    let current = answer(of_type);
    match current {
        Answer::None => html.markup("nothing sent"),
        Answer::Awaited => html.badge(Tone::Warn, "awaited"),
        Answer::Accepted { after } => {
            html.badge(Tone::Good, "ACK");
            html.note(&format!("after {}", span(after)))
        }
        Answer::Refused(refusal) => {
            html.badge(Tone::Bad, "NACK");
            html.markup(" ").text(&refusal.reason);
            html.note(&format!("{} UTC", moment(&refusal.at)))
        }
    };
    if let (Some(refusal), false) = (&of_type.last_nack, matches!(current, Answer::Refused(_))) {
        html.markup("<br>").badge(Tone::Warn, "earlier NACK");
        html.markup(" ").text(&refusal.reason);
        html.note(&format!("{} UTC", moment(&refusal.at)));
    }
}

/// What Envoy says of the last response; moments are to the second, so versions decide between two.
fn answer(of_type: &TypeSnapshot) -> Answer<'_> {
    let Some(response) = &of_type.last_response else {
        return Answer::None;
    };
    if !response.answered {
        return Answer::Awaited;
    }
    match (&of_type.last_ack, &of_type.last_nack) {
        (Some(ack), Some(nack)) => {
            let is_of_nack = nack.version.as_ref() == Some(&response.version);
            let is_of_ack = ack.version == response.version;
            let is_later = nack.at > ack.at || (nack.at == ack.at && is_of_nack && !is_of_ack);
            match is_later {
                true => Answer::Refused(nack),
                false => Answer::Accepted {
                    after: ack.after_seconds,
                },
            }
        }
        (Some(ack), None) => Answer::Accepted {
            after: ack.after_seconds,
        },
        (None, Some(nack)) => Answer::Refused(nack),
        (None, None) => Answer::Awaited,
    }
}
