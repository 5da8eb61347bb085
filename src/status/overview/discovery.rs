//! The xDS section of the page: what istiod has sent, and how Envoy has answered.

use maud::{Markup, html};

use super::page::{BAD, GOOD, WARN, Width, badge, card, counted, list, note, resource_type, size};
use crate::duration::approximate;
use crate::xds::observe::{Snapshot, Source, TypeSnapshot};

/// Whether Envoy has accepted the last response of every type.
pub(super) fn state(snapshot: &Snapshot) -> Markup {
    let types = || {
        snapshot
            .types
            .values()
            .filter(|of_type| is_answered(of_type))
    };
    match types().filter(|of_type| of_type.is_refused()).count() {
        0 if types().next().is_some() => badge(GOOD, "accepted"),
        0 => badge(WARN, "none yet"),
        count => badge(BAD, format!("{} refused", counted(count, "type"))),
    }
}

pub(super) fn section(snapshot: &Snapshot) -> Markup {
    let content = html! {
        p {
            @if let Some(stream) = &snapshot.stream {
                @if stream.source == Source::Kept { (badge(WARN, "kept configuration, istiod is away")) }
                @else if stream.connected { (badge(GOOD, "stream tied to istiod")) }
                @else { (badge(WARN, "stream waits for istiod")) }
                (note(format!("{}, number {}, since {}", stream.protocol, stream.id, stream.since)))
            } @else {
                (badge(BAD, "no stream of Envoy"))
                @if let Some(end) = &snapshot.last_end {
                    (note(format!("{}: {}", end.at, end.reason)))
                }
            }
        }
        (list(&["Type", "Version", "Last answer", "Last response"], html! {
            @for (url, of_type) in &snapshot.types { (row(url, of_type)) }
        }))
    };
    card(Width::Page, "Discovery (xDS)", "xdsz", content)
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
                    (approximate(response.age_seconds)) " ago"
                    @if response.source == Source::Kept { " " (badge(WARN, "kept")) }
                    (note(format!("{}, {}", counted(response.resources as usize, "resource"), size(response.bytes))))
                }
            }
        }
    }
}

fn last_answer(of_type: &TypeSnapshot) -> Markup {
    let is_refused = of_type.is_refused();
    let (class, words) = match is_refused {
        true => (BAD, "NACK"),
        false => (WARN, "earlier NACK"),
    };
    html! {
        @if of_type.last_response.is_none() { "nothing sent" }
        @else if !is_answered(of_type) { (badge(WARN, "awaited")) }
        @else if let (Some(ack), false) = (&of_type.last_ack, is_refused) {
            (badge(GOOD, "ACK")) (note(format!("after {}", approximate(ack.after_seconds))))
        }
        @if let Some(nack) = &of_type.last_nack {
            @if !is_refused { br; }
            (badge(class, words)) " " (nack.reason) (note(&nack.at))
        }
    }
}

fn is_answered(of_type: &TypeSnapshot) -> bool {
    let last = of_type.last_response.as_ref();
    last.is_some_and(|response| response.answered)
}
