//! The section of the page on Wasm modules. It is left out where there are none.

use maud::{Markup, html};

use super::format::size;
use super::page::{BAD, GOOD, WARN, Width, badge, card, list, note};
use crate::duration::approximate;
use crate::wasm::Snapshot;

pub(super) fn section(snapshot: &Snapshot) -> Option<Markup> {
    let Snapshot {
        resources,
        fetching,
    } = snapshot;
    if resources.is_empty() && fetching.is_empty() {
        return None;
    }
    let content = html! {
        (list(&["Module", "State", "Size"], html! {
            @for url in fetching {
                tr { td { (url) } td { (badge(WARN, "under way")) } td {} }
            }
            @for resource in resources {
                tr {
                    td { (resource.name) (note(&resource.url)) }
                    td {
                        @if let Some(error) = &resource.error {
                            (badge(BAD, "missing")) (note(error))
                        } @else {
                            (badge(GOOD, "in use"))
                        }
                        " for " (approximate(resource.age_seconds))
                        @if let Some(left) = resource.retry_seconds {
                            (note(format!("next attempt in {}", approximate(left))))
                        }
                        @if let Some(sha256) = &resource.sha256 { (note(sha256)) }
                    }
                    td { @if let Some(bytes) = resource.size_bytes { (size(bytes)) } }
                }
            }
        }))
    };
    Some(card(Width::Page, "Wasm modules", "wasm", content))
}
