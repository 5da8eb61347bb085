//! The xDS section of the page: what istiod has sent, and how Envoy has answered.

use maud::{Markup, html};

use super::format::{counted, duration, resource_type, size};
use super::page::{BAD, GOOD, WARN, badge, note, wide_section};
use crate::xds::observe::{NackSnapshot, Snapshot, TypeSnapshot};

/// How Envoy has answered the last response of a type.
#[derive(Clone, Copy, Debug)]
enum Answer<'a> {
    NothingSent,
    Awaited,
    Ack { after_seconds: f64 },
    Nack(&'a NackSnapshot),
}

/// Whether Envoy has accepted the last response of every type.
pub(super) fn state(snapshot: &Snapshot) -> Markup {
    let answers = || snapshot.types.values().map(answer);
    let nacks = answers().filter(|answer| matches!(answer, Answer::Nack(_)));
    match nacks.count() {
        0 if answers().any(|answer| matches!(answer, Answer::Ack { .. })) => {
            badge(GOOD, "accepted")
        }
        0 => badge(WARN, "none yet"),
        count => badge(BAD, format!("{} refused", counted(count, "type"))),
    }
}

pub(super) fn section(snapshot: &Snapshot) -> Markup {
    wide_section(
        "Discovery (xDS)",
        "xdsz",
        html! {
            p {
                @match (&snapshot.stream, &snapshot.last_end) {
                    (Some(stream), _) => {
                        @if stream.connected {
                            (badge(GOOD, "stream tied to istiod"))
                        } @else {
                            (badge(WARN, "stream waits for istiod"))
                        }
                        (note(format!("{}, number {}, since {}", stream.protocol, stream.id, stream.since)))
                    }
                    (None, end) => {
                        (badge(BAD, "no stream of Envoy"))
                        @if let Some(end) = end { (note(format!("{}: {}", end.at, end.reason))) }
                    }
                }
            }
            table.list {
                tr { th scope="col" { "Type" } th { "Version" } th { "Last answer" } th { "Last response" } }
                @for (url, of_type) in &snapshot.types { (row(url, of_type)) }
            }
        },
    )
}

fn row(url: &str, of_type: &TypeSnapshot) -> Markup {
    let (short, name) = resource_type(url);
    let response = of_type.last_response.as_ref();
    html! {
        tr {
            td {
                span title=(url) { (short.unwrap_or(name)) }
                @if short.is_some() { (note(name)) }
            }
            td data-of="Version" { @if let Some(response) = response { (response.version) } }
            td { (last_answer(of_type)) }
            td {
                @if let Some(response) = response {
                    (duration(response.age_seconds)) " ago"
                    (note(format!("{}, {}", counted(response.resources as usize, "resource"), size(response.bytes))))
                }
            }
        }
    }
}

fn last_answer(of_type: &TypeSnapshot) -> Markup {
    let current = answer(of_type);
    let nack = |tone, words, nack: &NackSnapshot| {
        html! { (badge(tone, words)) " " (nack.reason) (note(&nack.at)) }
    };
    html! {
        @match current {
            Answer::NothingSent => "nothing sent",
            Answer::Awaited => (badge(WARN, "awaited")),
            Answer::Ack { after_seconds } => {
                (badge(GOOD, "ACK")) (note(format!("after {}", duration(after_seconds))))
            }
            Answer::Nack(last) => (nack(BAD, "NACK", last)),
        }
        @if let (Some(earlier), false) = (&of_type.last_nack, matches!(current, Answer::Nack(_))) {
            br; (nack(WARN, "earlier NACK", earlier))
        }
    }
}

/// Times have whole seconds; of an ACK and a NACK within one, the one of this version is the last.
fn answer(of_type: &TypeSnapshot) -> Answer<'_> {
    let Some(response) = &of_type.last_response else {
        return Answer::NothingSent;
    };
    if !response.answered {
        return Answer::Awaited;
    }
    let (ack, nack) = (&of_type.last_ack, &of_type.last_nack);
    let nack_is_last = match (ack, nack) {
        (Some(ack), Some(nack)) if nack.at == ack.at => {
            nack.version.as_ref() == Some(&response.version) && ack.version != response.version
        }
        (Some(ack), Some(nack)) => nack.at > ack.at,
        (ack, _) => ack.is_none(),
    };
    match (ack, nack) {
        (_, Some(nack)) if nack_is_last => Answer::Nack(nack),
        (Some(ack), _) => Answer::Ack {
            after_seconds: ack.after_seconds,
        },
        _ => Answer::Awaited,
    }
}
